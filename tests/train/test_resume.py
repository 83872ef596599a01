"""A run that stops and resumes equals the run that did not stop, bit for bit; half-written checkpoints are never taken."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.checkpoint import Checkpoints, Progress, load_policy
from trace_jax.train.manifest import write_manifest
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.read_checkpoint import complete_steps
from trace_jax.train.run import _resumed, run_training
from trace_jax.train.run_folder import Ended, claimed, run_directory
from trace_jax.train.skipped import count_skipped

MEASURED_IN_SECONDS = ("time/", "throughput/")


def rows_of(directory) -> str:
    """The metrics of a run without what a clock measured; text, so that NaN equals NaN."""
    rows = read_metrics(directory)
    return json.dumps([{name: value for name, value in row.items() if not name.startswith(MEASURED_IN_SECONDS)} for row in rows], indent=0)


@pytest.fixture(scope="module")
def config(make_config, cold_start):
    return make_config(f"model.source={cold_start.directory}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, config):
    directory = tmp_path_factory.mktemp("straight")
    run_training(config, directory)
    return directory


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, config):
    """Two steps, then a new start of the program's objects and two more."""
    directory = tmp_path_factory.mktemp("stopped")
    run_training(config.model_copy(update={"steps": 2}), directory)
    run_training(config, directory, resume=True)
    return directory


@pytest.fixture
def copy(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted, tmp_path / "copy")


def restored(directory, config, step=4):
    checkpoints = Checkpoints(directory / "checkpoints")
    try:
        return checkpoints.restore(step, make_optimizer(config.optimizer))
    finally:
        checkpoints.close()


def test_ckpt_01_state_is_bit_equal(uninterrupted, interrupted, config):
    _, straight, progress = restored(uninterrupted, config)
    _, resumed, resumed_progress = restored(interrupted, config)
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert resumed_progress == progress == Progress(step=4, version=4, data_position=8, samples=32, seed=0)
    _, start, _ = restored(uninterrupted, config, 0)
    moved = [
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(jax.tree.leaves(start.params), jax.tree.leaves(straight.params), strict=True)
    ]
    assert all(moved), "nothing was learned, so the comparison would prove nothing"


def test_ckpt_05_06_metrics_and_learning_rate_are_equal(uninterrupted, interrupted):
    assert rows_of(interrupted) == rows_of(uninterrupted)
    rates = [row["learning_rate"] for row in read_metrics(interrupted) if row["step"]]
    np.testing.assert_allclose(rates, [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3], rtol=1e-6)


def test_ckpt_08_11_the_same_prompts_and_answers(uninterrupted, interrupted):
    files = sorted(path.name for path in (uninterrupted / "rollouts").iterdir())
    assert files == [f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)]
    samples = []
    for name in files:
        assert (interrupted / "rollouts" / name).read_bytes() == (uninterrupted / "rollouts" / name).read_bytes()
        samples += [json.loads(line)["sample_id"] for line in (interrupted / "rollouts" / name).read_text().splitlines()]
    assert samples == list(range(32))


def test_ckpt_06_the_engine_has_the_restored_weights_before_the_first_rollout(uninterrupted, config):
    checkpoints = Checkpoints(uninterrupted / "checkpoints")
    learner = _resumed(config, checkpoints, 4)
    checkpoints.close()
    assert learner.engine.health().version == learner.progress.version == learner.served.version == 4
    learner.engine.close()


def test_jax_02_dtype_and_placement_of_restored_leaves(uninterrupted, config):
    _, state, _ = restored(uninterrupted, config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state.params, state.multipliers)))
    shapes = jax.eval_shape(make_optimizer(config.optimizer).init, state.params)
    jax.tree.map(lambda leaf, shape: np.testing.assert_equal((leaf.shape, leaf.dtype), (shape.shape, shape.dtype)), state.opt_state, shapes)
    assert all(isinstance(leaf, jax.Array) and leaf.devices() == {jax.local_devices()[0]} for leaf in jax.tree.leaves(state))


def test_resuming_a_finished_run_changes_nothing(copy, config):
    before = rows_of(copy)
    assert run_training(config, copy, resume=True) == Ended({}, stopped=False)
    assert rows_of(copy) == before


@pytest.mark.parametrize("remains", ["config only", "step 0"])
def test_resume_from_the_very_beginning(copy, uninterrupted, config, remains):
    """Killed before, or right after, the first checkpoint: the row of step 0 is there already."""
    for step in (0, 2, 4) if remains == "config only" else (2, 4):
        shutil.rmtree(copy / "checkpoints" / str(step))
    run_training(config, copy, resume=True)
    assert rows_of(copy) == rows_of(uninterrupted)


@pytest.mark.parametrize("name", ["4.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-7"])
def test_ckpt_09_an_unfinished_save_is_not_a_checkpoint_and_is_cleared_away(copy, uninterrupted, config, name):
    checkpoints = copy / "checkpoints"
    shutil.move(checkpoints / "4", checkpoints / name)
    shutil.rmtree(checkpoints / name / "optimizer")
    assert load_policy(copy).meta["progress"]["step"] == 2
    assert (checkpoints / name).is_dir()  # a reader clears nothing: the run may be alive
    run_training(config, copy, resume=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["0", "2", "4"]
    assert rows_of(copy) == rows_of(uninterrupted)
    _, again, _ = restored(copy, config)
    jax.tree.map(np.testing.assert_array_equal, again, restored(uninterrupted, config)[1])


def test_a_save_that_cannot_fit_is_refused_before_it_begins(copy, config, monkeypatch):
    """One line and the remedy; Orbax would fill the screen. (A disk that really fills up was tried by hand.)"""
    monkeypatch.setattr("trace_jax.train.checkpoint.SPARE_BYTES", 1 << 60)
    (copy / "checkpoints" / "4").rename(copy / "moved")
    with pytest.raises(UserError, match=r"no space left .* --resume \(last complete checkpoint: step 2\)"):
        run_training(config, copy, resume=True)
    assert complete_steps(copy / "checkpoints") == [0, 2]


def test_one_save_at_most_is_under_way(tmp_path, uninterrupted, config):
    policy, state, progress = restored(uninterrupted, config)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(state, replace(progress, step=step), policy, "ascii", {})
        assert complete_steps(tmp_path)[: step - 1] == list(range(1, step))  # all but the one just started
    checkpoints.close()
    assert complete_steps(tmp_path) == [1, 2, 3]


def test_a_kill_inside_a_save_leaves_the_checkpoint_before(tmp_path, uninterrupted):
    """A real kill, of a process that dies as soon as the save of step 5 has put its first file on disk."""
    program = f"""
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import optax
from trace_jax.train.checkpoint import Checkpoints, Progress, load_policy
from trace_jax.train.state import TrainState
loaded = load_policy({str(uninterrupted)!r})
folder, state = Path({str(tmp_path)!r}), TrainState(loaded.params, optax.adam(1.0).init(loaded.params), loaded.multipliers)
checkpoints = Checkpoints(folder)
checkpoints.save(state, Progress(step=3), loaded.policy, "ascii", {{}})
checkpoints.wait()
checkpoints.save(state, Progress(step=5), loaded.policy, "ascii", {{}})
while not any(path.is_file() for path in folder.glob("5.orbax-checkpoint-tmp*/**/*")):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert any(tmp_path.glob("5.orbax-checkpoint-tmp*")) and complete_steps(tmp_path) == [3]
    assert load_policy(tmp_path).meta["progress"]["step"] == 3
    Checkpoints(tmp_path).remove_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_the_count_of_refused_updates_survives(tmp_path, uninterrupted, config):
    """Three in a row end a run, also when a resume lies between them."""
    policy, state, progress = restored(uninterrupted, config)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, replace(progress, skipped_in_a_row=2), policy, "ascii", config.model_dump(mode="json"))
    checkpoints.wait()
    learner = _resumed(config, checkpoints, 4)
    assert learner.progress.skipped_in_a_row == 2
    with pytest.raises(UserError, match="3 gradients in a row"):
        count_skipped(learner.progress.skipped_in_a_row, float("nan"), 5, "mend it")
    learner.engine.close()
    checkpoints.close()


def test_another_format_version_is_refused(copy, config):
    step = copy / "checkpoints" / "4"
    meta = step / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"format_version": 1', '"format_version": 99'))
    write_manifest(step)
    with pytest.raises(UserError, match="format 99"):
        restored(copy, config)


def test_a_used_directory_is_refused_and_untouched(copy):
    def content():
        return {path: path.stat().st_mtime_ns for path in copy.rglob("*")}

    before = content()
    with pytest.raises(UserError, match="is not empty; add --resume"):
        run_directory(copy, "name", resume=False)
    assert content() == before
    assert run_directory(copy, "name", resume=True) == copy


def test_nothing_to_resume(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        run_directory(tmp_path / "new", "name", resume=True)
    assert not (tmp_path / "new").exists()


def test_a_run_that_cannot_start_leaves_nothing(tmp_path, make_config):
    with pytest.raises(UserError, match="vocab_size"):
        run_training(make_config("model.config.vocab_size=100"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_keep_the_last_checkpoints(tmp_path, uninterrupted, config):
    policy, state, progress = restored(uninterrupted, config)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 3, 3):
        checkpoints.save(state, replace(progress, step=step), policy, "ascii", {})
        checkpoints.wait()
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["2", "3"]


def test_a_run_that_another_program_holds_is_left_alone(copy, config):
    """The second program must not clear away what the first one is saving."""
    saving = copy / "checkpoints" / "6.orbax-checkpoint-tmp"
    saving.mkdir()
    with claimed(copy, resume=True), pytest.raises(UserError, match="in use by another program"):
        run_training(config, copy, resume=True)
    assert saving.is_dir()
