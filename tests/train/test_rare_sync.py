"""`sync.every` above 1: the engine's weights follow from it alone, and not from when the run evaluates, saves or is resumed."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train import rl
from trace_jax.train.checkpoint import Checkpoints, load_policy
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run import run_training

STEPS = 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(make_config, cold_start):
    return lambda *overrides: make_config(
        f"model.source={cold_start.directory}",
        "sync.every=2",
        "sync.max_staleness=1",
        "guidance.audit.every=0",
        f"steps={STEPS}",
        *overrides,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, config):
    """No evaluation, and no checkpoint on the way."""
    directory = tmp_path_factory.mktemp("run")
    run_training(config("eval.every=0", "checkpoint.every=100"), directory)
    return directory


def answers_of(directory) -> list[bytes]:
    return [(directory / "rollouts" / f"step_{step:06d}.jsonl").read_bytes() for step in range(1, STEPS + 1)]


def rows_of(directory) -> str:
    """Metrics without evaluations and without what a clock measured; text, so that NaN equals NaN."""
    left_out = ("time/", "throughput/", "eval/")
    rows = [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in read_metrics(directory)]
    return json.dumps([row for row in rows if row["step"]], indent=0)


def state_of(directory, config, step=STEPS):
    checkpoints = Checkpoints(directory / "checkpoints")
    restored = checkpoints.restore(step, make_optimizer(config.optimizer))[1:], checkpoints.restore_served(step)
    checkpoints.close()
    return restored


def assert_the_same_run(directory, expected, config):
    assert answers_of(directory) == answers_of(expected) and rows_of(directory) == rows_of(expected)
    (state, progress), served = state_of(directory, config)
    (expected_state, expected_progress), expected_served = state_of(expected, config)
    jax.tree.map(np.testing.assert_array_equal, (state, served), (expected_state, expected_served))
    assert progress == expected_progress


def test_the_engine_is_behind_at_odd_steps(undisturbed):
    """The control of the tests below: with an engine that is always up to date they would prove nothing."""
    assert [row["sync/version"] for row in read_metrics(undisturbed)] == [0, 2, 2, 4, 4]
    assert len(set(answers_of(undisturbed))) == STEPS


def test_evaluating_and_saving_change_nothing(undisturbed, config, tmp_path):
    run_training(config("eval.every=1", "checkpoint.every=1"), tmp_path)
    assert_the_same_run(tmp_path, undisturbed, config())
    assert all("eval/validation/pass_at_1" in row for row in read_metrics(tmp_path))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_equals_the_uninterrupted_one(undisturbed, config, tmp_path, step):
    settings = config("eval.every=0", "checkpoint.every=100")
    run_training(settings.model_copy(update={"steps": step}), tmp_path)
    (state, progress), served = state_of(tmp_path, settings, step)
    if step % 2:
        assert served is not None and served.version == progress.version - 1
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(served.params), jax.tree.leaves(state.params), strict=True))
    else:
        assert served is None and not (tmp_path / "checkpoints" / str(step) / "served").exists()
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path).params, state.params)  # a policy is its newest weights
    run_training(settings, tmp_path, resume=True)
    assert_the_same_run(tmp_path, undisturbed, settings)


def test_an_evaluation_measures_the_newest_weights(config, tmp_path, monkeypatch):
    versions = []

    def measured(engine, *arguments, **settings):
        versions.append(engine.health().version)
        return measure_pass_rate(engine, *arguments, **settings)

    measure_pass_rate = rl.measure_pass_rate
    monkeypatch.setattr(rl, "measure_pass_rate", measured)
    run_training(config("eval.every=1", "steps=2"), tmp_path)
    assert versions == [0, 1, 2]


def test_weights_that_the_engine_has_are_not_sent_again(config, tmp_path, monkeypatch):
    """One transfer at the start and one every second update; evaluations at odd steps bring newer weights and the older ones back."""
    sent = []

    def counted(engine, setup, params, multipliers, version):
        sent.append(version)
        return sync_weights(engine, setup, params, multipliers, version)

    sync_weights = rl.sync_weights
    monkeypatch.setattr(rl, "sync_weights", counted)
    run_training(config("eval.every=3", "checkpoint.every=1", "steps=4"), tmp_path)
    assert sent == [0, 2, 3, 2, 4]
