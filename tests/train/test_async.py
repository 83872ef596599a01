"""Asynchronous runs with the embedded engine: nothing lost or doubled, exact counters, old guidance counted by age."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.ragged_batches import random_trajectories
from tests.train.invariants import answers_of, violations
from trace_jax.config import from_mapping
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.rollout import UpdateDigest
from trace_jax.rollout.engine import send_weights
from trace_jax.tasks import Task
from trace_jax.train import rl
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.manifest import write_manifest
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.read_checkpoint import read_meta
from trace_jax.train.rollout_metrics import staleness_metrics
from trace_jax.train.run import _resumed, run_training
from trace_jax.train.setup import sync_weights, weight_updates

STEPS = 6


@pytest.fixture(scope="module")
def config(make_config, cold_start):
    return make_config(f"model.source={cold_start.directory}", "sync.max_staleness=2", "checkpoint.every=3", f"steps={STEPS}")


@pytest.fixture(scope="module")
def run(tmp_path_factory, config) -> Path:
    directory = tmp_path_factory.mktemp("async")
    run_training(config, directory)
    return directory


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


def test_a_run_uses_every_prompt_once_and_no_answer_too_old(run):
    assert violations(run) == []
    rows = [row for row in read_metrics(run) if row["step"]]
    assert max(row["sync/staleness"] for row in rows) == 2 and all(row["sync/regenerated"] == 0 for row in rows)
    assert all(np.isfinite(row["loss"]) and row["sync/staleness_mean"] <= row["sync/staleness"] for row in rows)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("rollout", "score"))]


def test_guidance_of_older_versions_is_used_and_counted_by_age(run):
    for row in (row for row in read_metrics(run) if row["step"]):
        gaps = {int(name.rsplit("/", 1)[1]): share for name, share in row.items() if name.startswith("guidance/version_gap/")}
        assert sum(gaps.values()) == pytest.approx(1) and max(gaps) == row["sync/staleness"] and row["guidance/missing_fraction"] == 0
        audited = {name for name in row if name.startswith("guidance/audit/outside_bracket_fraction/expert_input/layer_1/gap_")}
        assert {int(name.rsplit("_", 1)[1]) for name in audited} == (set(gaps) if row["step"] % 2 == 0 and any(gaps) else set())


def rewrite(directory: Path, step: int, change) -> None:
    path = directory / "rollouts" / f"step_{step:06d}.jsonl"
    rows = change(answers_of(directory, step))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda rows: rows[4:], "samples are missing"),
        (lambda rows: [*rows, *rows[:4]], "samples are missing, repeated"),
        (lambda rows: [*rows[4:], *rows[:4]], "out of order"),
        (lambda rows: [row | {"prompt_id": rows[0]["prompt_id"]} for row in rows], "prompts are not those of the stream"),
        (lambda rows: [row | {"group": rows[0]["group"]} for row in rows], "a group is torn"),
        (lambda rows: [row | {"weight_version": [0, 1]} for row in rows], "step 5 begins at version 4 and uses answers of [0]"),
        (lambda rows: [row | {"weight_version": [4, 5]} for row in rows], "step 5 begins at version 4"),
    ],
)
def test_the_checker_sees_what_is_wrong(copy, damage, found):
    rewrite(copy, 5, damage)
    assert any(found in violation for violation in violations(copy))


def test_the_checker_sees_lost_steps_and_wrong_counters(copy):
    meta = copy / "checkpoints" / "3" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"data_position": 6', '"data_position": 8'))
    shutil.rmtree(copy / "checkpoints" / "6")
    (copy / "rollouts" / "step_000006.jsonl").unlink()
    (copy / "checkpoints" / "3" / "manifest.json").unlink()
    write_manifest(copy / "checkpoints" / "3")
    found = violations(copy)
    assert any("checkpoint 3 has" in each for each in found) and any(each.startswith("steps [1, 2, 3, 4, 5, 6]") for each in found)


@pytest.mark.parametrize("step", [2, 3])
def test_ckpt_02_03_what_is_in_flight_at_a_stop_is_generated_again(config, tmp_path, step):
    """Stopped by a signal while batches wait; the queue is dropped, its prompts and ids come again, and the resume does not hang."""

    def stop(at: int, metrics) -> None:
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    assert run_training(config, tmp_path, report=stop).stopped
    assert violations(tmp_path) == [] and read_metrics(tmp_path)[-1]["step"] == step
    meta = read_meta(tmp_path / "checkpoints" / str(step))
    assert meta["progress"]["data_position"] == 2 * step and meta["served_version"] == step  # not what had run ahead
    run_training(config, tmp_path, resume=True)
    assert violations(tmp_path) == []
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    progress = checkpoints.restore(STEPS, make_optimizer(config.optimizer))[2]
    checkpoints.close()
    assert progress == Progress(step=STEPS, version=STEPS, data_position=2 * STEPS, samples=8 * STEPS, seed=0)


def test_ckpt_06_a_resumed_stream_begins_with_the_restored_weights(run, config):
    checkpoints = Checkpoints(run / "checkpoints")
    learner = _resumed(config.model_copy(update={"steps": 9}), checkpoints, STEPS)
    checkpoints.close()
    assert learner.stream is not None and learner.stream.version == learner.engine.health().version == STEPS
    batch = learner.stream.take(STEPS, 3)
    assert batch.scored.trajectories.sample_id.tolist() == list(range(48, 56)) and set(batch.scored.trajectories.weight_version) == {STEPS}
    learner.close()


def test_sync_03_both_ways_send_the_same_bytes(run, config):
    """What waits for the engine in an asynchronous run is what a synchronous one sends."""
    checkpoints = Checkpoints(run / "checkpoints")
    learner = _resumed(config, checkpoints, STEPS)
    checkpoints.close()
    setup, state = learner.setup, learner.state
    direct = sync_weights(learner.engine, setup, state.params, state.multipliers, 9)
    waiting = list(weight_updates(setup, state.params, state.multipliers))
    assert send_weights(learner.engine, waiting, 9) == direct
    digest = UpdateDigest()
    list(digest.observe(weight_updates(setup, {**state.params, "final_norm": state.params["final_norm"] + 1}, state.multipliers)))
    assert digest.ack(9) != direct
    learner.close()


def test_an_evaluation_has_the_engine_and_the_newest_weights_for_itself(config, tmp_path, monkeypatch):
    seen = []

    def measured(engine, *arguments, **settings):
        seen.append((engine.health().version, engine.health().pending))
        return measure_pass_rate(engine, *arguments, **settings)

    measure_pass_rate = rl.measure_pass_rate
    monkeypatch.setattr(rl, "measure_pass_rate", measured)
    settings = ("sync.every=2", "sync.max_staleness=3", "eval.every=1", "steps=4")
    run_training(from_mapping(config.model_dump(mode="json"), settings), tmp_path)
    assert seen == [(version, 0) for version in range(5)]
    assert violations(tmp_path) == []


def test_figures_of_age():
    """Three sequences with a version for every token; the second was drawn under two, and some rows have no record."""
    answers = random_trajectories([3, 4, 2], seed=1)
    versions = np.asarray([3, 3, 3, 2, 2, 2, 3, 4, 4], np.int32)
    answers = answers.replace(weight_version=versions, guidance=replace(answers.guidance, version=versions))
    metrics = staleness_metrics(answers, 4)
    # By hand: six tokens were sampled, at ages 1, 1, 2, 2, 0, 0; the eight rows with a record have ages 1, 1, 2, 2, 2, 1, 0, 0.
    assert (answers.sampled.tolist(), answers.guidance.valid.tolist()) == (
        [True, False, True, False, True, True, False, True, True],
        [True, True, False, True, True, True, True, True, True],
    )
    assert metrics["sync/staleness_mean"] == 1.0 and metrics["sync/mixed_fraction"] == pytest.approx(1 / 3)
    assert {name: share for name, share in metrics.items() if name.startswith("guidance/")} == {
        "guidance/version_gap/0": 2 / 8,
        "guidance/version_gap/1": 3 / 8,
        "guidance/version_gap/2": 3 / 8,
    }
    assert not [name for name in staleness_metrics(answers.replace(guidance=None), 4) if name.startswith("guidance/")]


def test_answers_that_are_being_verified_at_the_end_keep_their_verifier(config, tmp_path, monkeypatch):
    """The learner ends before its task: the stream's thread still verifies what was generated ahead of the last step."""
    order: list[str] = []
    for owner, name in ((rl.Learner, "learner"), (Task, "task")):
        close = owner.close
        monkeypatch.setattr(owner, "close", lambda self, close=close, name=name: (order.append(name), close(self))[1])
    run_training(from_mapping(config.model_dump(mode="json"), ["steps=1", "eval.every=0", "guidance.audit.every=0"]), tmp_path / "run")
    assert order[:2] == ["learner", "task"]
