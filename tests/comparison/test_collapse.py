"""Collapse in series made by hand: found where it begins, and not where there is only noise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.comparison.made_runs import evaluation
from trace_jax.comparison.collapse import GRADIENT_FACTOR, KL_LIMIT, LASTING, Collapse, find_collapse
from trace_jax.report.series import Run

KL, NORM = "rollout_corr/k3_kl", "grad_norm"


def collapse(rows: dict[int, dict[str, Any]], diverged: int | None = None) -> Collapse | None:
    return find_collapse(Run("run", [{"step": step} | row for step, row in rows.items()]), "validation", diverged)


def evaluated(*rates: float) -> dict[int, dict[str, Any]]:
    """An evaluation of 40 answers every 10 steps."""
    return {10 * index: evaluation(rate) for index, rate in enumerate(rates)}


def series(key: str, values: list[float]) -> dict[int, dict[str, Any]]:
    return {step: {key: value} for step, value in enumerate(values, 1)}


@pytest.mark.parametrize(
    ("rates", "step"),
    [
        ((0.3, 0.6, 0.1, 0.05, 0.1), 20),  # falls and stays
        ((0.3, 0.6, 0.5, 0.1), 30),  # the last evaluation needs no next one
        ((0.3, 0.6, 0.1, 0.5, 0.6), None),  # recovers
        ((0.3, 0.6, 0.1, 0.5, 0.0, 0.0), 40),  # falls again for good
        ((0.3, 0.6, 0.31, 0.31), None),  # more than half is left
        ((0.6, 0.5, 0.45), None),
        ((0.05, 0.02, 0.0), None),  # below half, but 2 of 40 and 0 of 40 are not known to differ
        ((0.0, 0.0), None),
        ((0.4,), None),
        ((), None),
    ],
)
def test_reward(rates: tuple[float, ...], step: int | None) -> None:
    found = collapse(evaluated(*rates))
    assert found == (None if step is None else Collapse(step, "reward"))


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.1] * 5 + [2.0] * LASTING, 6),
        ([0.1] * 5 + [2.0] * (LASTING - 1) + [0.1], None),  # one step too short
        ([2.0] * (LASTING - 1) + [0.1] + [2.0] * LASTING, LASTING + 1),  # an interruption starts the count again
        ([KL_LIMIT] * 30, None),  # at the limit, not above
        ([0.1] + [math.nan] * LASTING, 2),  # not finite is above every limit
        ([2.0] * (LASTING - 1), None),
    ],
)
def test_kl(values: list[float], step: int | None) -> None:
    assert collapse(series(KL, values)) == (None if step is None else Collapse(step, "kl"))


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.5] * LASTING + [51.0] * LASTING, LASTING + 1),
        ([0.5] * LASTING + [49.0] * LASTING, None),
        ([0.5] * LASTING + [51.0] * 3 + [0.5] * LASTING, None),
        ([0.5] * LASTING + [math.inf] * LASTING, LASTING + 1),
        ([9.0] + [0.5] * (LASTING - 1) + [51.0] * LASTING, LASTING + 1),  # a wild first step does not raise the limit
        ([0.0] * (LASTING - 2) + [0.5] * 2 + [0.5] * LASTING, None),  # steps without a signal do not make any gradient a large one
        ([math.nan] * LASTING, None),  # no step to compare with; `diverged` says it
    ],
)
def test_gradient(values: list[float], step: int | None) -> None:
    assert GRADIENT_FACTOR == 100
    assert collapse(series(NORM, values)) == (None if step is None else Collapse(step, "gradient"))


def test_the_first_of_several_counts() -> None:
    rows = {step: {KL: 2.0, NORM: 0.5} for step in range(1, 31)} | {0: evaluation(0.6), 31: evaluation(0.0)}
    rows = {step: rows[step] for step in sorted(rows)}
    assert collapse(rows) == Collapse(1, "kl")
    assert collapse(evaluated(0.6, 0.0), diverged=5) == Collapse(5, "diverged")
    assert collapse(evaluated(0.6, 0.0), diverged=15) == Collapse(10, "reward")
