"""What is kept of the metrics of many runs: the curves that the study draws, averaged over a few steps and shortened to four digits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.errors import UserError
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
_AGED = re.compile(r"guidance/audit/(?P<figure>[^/]+)/[^/]+/layer_\d+/gap_(?P<age>\d+)")
_RUN = re.compile(r"(?P<method>.+)-seed-(?P<seed>\d+)")

BIN = 5
"""Steps that one point of a curve is the mean of; what is recorded more rarely keeps all of its points."""


def curves(folder: Path) -> dict[str, dict[str, Any]]:
    """Method -> metric -> one series a seed, `seed`, `steps` and `values`; what no run recorded is left out.

    Args:
      folder: holds runs `<method>-seed-<n>` at any depth, as `trace-jax compare` names them.

    Raises:
      UserError: there is no such run, or one that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    named = [(match, path.parent) for path in sorted(folder.rglob("metrics.jsonl")) if (match := _RUN.fullmatch(path.parent.name))]
    if not named:
        raise UserError(f"{folder}: no runs named METHOD-seed-N; give the folder that trace-jax compare wrote")
    for (match, _), run in zip(named, load_runs([path for _, path in named]), strict=True):
        for metric in KEPT:
            points = _points(run, metric)
            if points:
                series = {"seed": int(match["seed"]), "steps": list(points), "values": list(points.values())}
                found.setdefault(match["method"], {}).setdefault(metric, []).append(series)
    return found


def by_age(run: Path) -> dict[str, dict[str, float]]:
    """Age of a record in updates -> figure of the audit -> median over steps, layers and sites.

    Raises:
      UserError: the run cannot be read, or trained on no record older than its weights.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for row in load_runs([run])[0].rows:
        for key, value in row.items():
            match = _AGED.fullmatch(key)
            if match and value is not None:
                values.setdefault(match["age"], {}).setdefault(match["figure"], []).append(value)
    if not values:
        raise UserError(f"{run}: no audited record is older than the weights; train with sync.max_staleness=3 guidance.audit.every=1")
    return {age: {figure: float(np.median(found)) for figure, found in values[age].items()} for age in sorted(values, key=int)}


def _points(run: Run, name: str) -> dict[int, float]:
    """Last step of a bin -> mean of the bin."""
    series = run.series(name)
    bins = (series.steps + BIN - 1) // BIN
    return {
        int(series.steps[bins == index].max()): float(f"{np.mean(series.values[bins == index]):.4g}")
        for index in dict.fromkeys(bins.tolist())
    }
