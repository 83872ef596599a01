"""Whether and when a run collapsed: one definition for every method, from what `metrics.jsonl` holds.

A run has collapsed at the first step at which one of these begins:

* `reward`: a held-out pass@1 below half of the best before it, its interval below that of the best, and so at the next evaluation too
  (the last evaluation needs no next one);
* `kl`: the KL (k3) of the forward that trains above `KL_LIMIT` nats per token in each of `LASTING` recorded steps;
* `gradient`: a gradient norm above `GRADIENT_FACTOR` times the median of the positive ones of the first `LASTING` steps, as long;
* `diverged`: the run gave up because gradients were no longer finite.

A value that is not finite is above every limit. Published collapses show as the first two (docs/comparison.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from trace_jax.report.plots import interval
from trace_jax.report.series import Run

KL_LIMIT = 1.0
GRADIENT_FACTOR = 100.0
LASTING = 10
"""Steps in a row beyond a limit that are a collapse; single steps are outliers."""


Reason: TypeAlias = Literal["reward", "kl", "gradient", "diverged"]


@dataclass(frozen=True)
class Collapse:
    """The step at which it began, and what showed it."""

    step: int
    reason: Reason


def find_collapse(run: Run, split: str, diverged: int | None = None) -> Collapse | None:
    """The first collapse of a run, or None.

    Args:
      run: its rows.
      split: that it was evaluated on.
      diverged: the step at which it gave up, None if it did not.
    """
    steps: tuple[tuple[int | None, Reason], ...] = (
        (_reward(run, split), "reward"),
        (_beyond(run, "rollout_corr/k3_kl", KL_LIMIT), "kl"),
        (_gradient(run), "gradient"),
        (diverged, "diverged"),
    )
    found = [Collapse(step, reason) for step, reason in steps if step is not None]
    return min(found, key=lambda collapse: collapse.step, default=None)


def _reward(run: Run, split: str) -> int | None:
    points = run.series(f"eval/{split}/pass_at_1")
    low, high = interval(run, split, "pass_at_1", points)
    values = points.values

    def fallen(index: int, best: int) -> bool:
        return bool(values[index] < values[best] / 2 and high[index] < low[best])

    for index in range(1, len(values)):
        best = int(values[:index].argmax())
        if fallen(index, best) and (index + 1 == len(values) or fallen(index + 1, best)):
            return int(points.steps[index])
    return None


def _gradient(run: Run) -> int | None:
    norms = [row["grad_norm"] for row in run.rows if "grad_norm" in row][:LASTING]
    positive = [norm for norm in norms if math.isfinite(norm) and norm > 0]  # 0 where no group had a signal
    return _beyond(run, "grad_norm", GRADIENT_FACTOR * median(positive)) if positive else None


def _beyond(run: Run, key: str, limit: float) -> int | None:
    """The first of `LASTING` recorded steps in a row whose value is above a limit or not finite."""
    recorded = [(row["step"], row[key]) for row in run.rows if key in row]
    return _lasting([step for step, _ in recorded], [not value <= limit for _, value in recorded])


def _lasting(steps: Sequence[int], beyond: Sequence[bool]) -> int | None:
    for start in range(len(steps) - LASTING + 1):
        if all(beyond[start : start + LASTING]):
            return steps[start]
    return None
