"""The default compute dtype of users: a BF16 run that stops and resumes equals the one that did not stop, bit for bit."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.checkpoint import Checkpoints
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run import run_training


def state_of(directory, config):
    checkpoints = Checkpoints(directory / "checkpoints")
    _, state, progress = checkpoints.restore(4, make_optimizer(config.optimizer))
    checkpoints.close()
    return state, progress


def rows_of(directory) -> str:
    """Metrics without what a clock measured; text, so that NaN equals NaN."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))} for row in read_metrics(directory)
    ]
    return json.dumps(rows, indent=0)


@pytest.mark.slow
def test_ckpt_01_a_bf16_run_resumes_bit_for_bit(make_config, cold_start, tmp_path):
    config = make_config(f"model.source={cold_start.directory}", "model.compute_dtype=bf16")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_training(config, straight)
    run_training(config.model_copy(update={"steps": 2}), stopped)
    jax.clear_caches()  # the second start of a real program compiles, or reads from the cache, again
    run_training(config, stopped, resume=True)
    (expected, progress), (resumed, resumed_progress) = state_of(straight, config), state_of(stopped, config)
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)
    assert resumed_progress == progress and progress.version == 4
    assert rows_of(stopped) == rows_of(straight)
    for path in sorted((straight / "rollouts").iterdir()):
        assert (stopped / "rollouts" / path.name).read_bytes() == path.read_bytes()
