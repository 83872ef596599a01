"""What is kept of the metrics of many runs: the curves that the study draws, averaged over a few steps and shortened to four digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.report.series import Run, load_runs

KEPT = (
    "reward/mean",
    "reward/pass_rate",
    "rollout_corr/k3_kl",
    "unguided/rollout_corr/k3_kl",
    "train_rollout_logprob_abs_diff_max",
    "grad_norm",
    "policy/entropy",
    "response/length_mean",
    "eval/validation/pass_at_1",
)
BIN = 5
"""Steps that one point of a curve is the mean of; what is recorded more rarely keeps all of its points."""


def method_curves(runs: Sequence[Path]) -> dict[str, Any]:
    """The curves of one method.

    Args:
      runs: its run folders, one a seed.

    Returns:
      Metric -> `steps` and, per seed, `values`; metrics that no run recorded are left out.

    Raises:
      UserError: a folder holds no run.
    """
    loaded = load_runs(list(runs))
    curves = {}
    for name in KEPT:
        points = [_points(run, name) for run in loaded]
        if any(points):
            curves[name] = [{"steps": list(found), "values": list(found.values())} for found in points]
    return curves


def _points(run: Run, name: str) -> dict[int, float]:
    """Last step of a bin -> mean of the bin."""
    series = run.series(name)
    bins = (series.steps + BIN - 1) // BIN
    return {
        int(series.steps[bins == index].max()): float(f"{np.mean(series.values[bins == index]):.4g}")
        for index in dict.fromkeys(bins.tolist())
    }
