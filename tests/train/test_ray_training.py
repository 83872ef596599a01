"""A training run with two engines on Ray is the run with one engine, and leaves no process behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from trace_jax.train.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RAY = ("rollout.launcher=ray", "rollout.engines=2", "rollout.ray.num_cpus=0.5", "rollout.ray.object_store_gib=0.1")
METRICS = ("reward/mean", "loss", "grad_norm", "train_rollout_logprob_abs_diff", "sync/version", "guidance/bytes_per_token")


def completions(folder: Path) -> list[list[str]]:
    """The answers of every step."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line)["completion"] for line in file.read_text().splitlines()] for file in files]


def test_answers_and_metrics_are_those_of_one_engine(require, make_config, cold_start, tmp_path, monkeypatch, environment):
    """Also where a run with one engine is resumed with two."""
    require("ray")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    start = f"model.source={cold_start.directory}"
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    one = run_training(make_config(start, "steps=3"), tmp_path / "one").metrics
    two = run_training(make_config(start, "steps=3", *RAY), tmp_path / "two").metrics
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not [process for process in left if "ray" in " ".join(process.cmdline())]
    run_training(make_config(start, "steps=2"), tmp_path / "resumed")
    resumed = run_training(make_config(start, "steps=3", *RAY), tmp_path / "resumed", resume=True).metrics
    wanted = completions(tmp_path / "one")
    assert len(wanted) == 3 and completions(tmp_path / "two") == completions(tmp_path / "resumed") == wanted
    for name in METRICS:
        measured: list[Any] = [two[name], resumed[name]]
        np.testing.assert_allclose(measured, [one[name]] * 2, rtol=1e-3, atol=1e-5, err_msg=name)
    assert two["sync/version"] == 3 and two["reward/mean"] > 0
