"""Several seeds of one method as one: pass rates with the interval of all answers, everything else as a mean or median."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeAlias

from trace_jax.evaluation.pass_rate import effective_answers, wilson
from trace_jax.report.series import Run

Rate: TypeAlias = Mapping[str, float]
"""`pass_at_1`, `low`, `high` and `reward_mean`."""


def pooled_rate(rates: Sequence[Rate]) -> dict[str, float] | None:
    """Mean pass rate of the seeds, with the score interval of the answers of all of them together and their number; None without any.

    Seeds are few, so their spread is no interval. This one says how exactly the rate of these very policies is known, over prompts and
    answers; how far another seed could be from it shows in the rates of the single seeds.
    """
    if not rates:
        return None
    rate = fmean(one["pass_at_1"] for one in rates)
    low, high = _pooled_interval([(one["pass_at_1"], one["low"], one["high"]) for one in rates])
    return {"pass_at_1": rate, "low": low, "high": high, "reward_mean": fmean(one["reward_mean"] for one in rates), "seeds": len(rates)}


def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every key over those that have it, keys in order of appearance."""
    keys = dict.fromkeys(key for one in values for key in one)
    return {key: median(one[key] for one in values if key in one) for key in keys}


def mean_run(name: str, runs: Sequence[Run], split: str) -> Run:
    """The runs of a method as one whose metrics are the means over the seeds that recorded the step; for curves.

    Intervals of the held-out evaluations are pooled.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.rows:
            by_step.setdefault(row["step"], []).append(row)
    return Run(name, [_mean_row(step, by_step[step], split) for step in sorted(by_step)], runs[0].config)


def _mean_row(step: int, rows: Sequence[Mapping[str, Any]], split: str) -> dict[str, Any]:
    merged: dict[str, Any] = {"step": step}
    for key in dict.fromkeys(key for row in rows for key in row if key != "step"):
        values = [row[key] for row in rows if key in row]
        merged[key] = values[0] if isinstance(values[0], str) else fmean(values)
    prefix = f"eval/{split}/pass_at_1"
    rates = [(row[prefix], row[f"{prefix}_low"], row[f"{prefix}_high"]) for row in rows if math.isfinite(row.get(prefix, math.nan))]
    if rates:
        merged[f"{prefix}_low"], merged[f"{prefix}_high"] = _pooled_interval(rates)
    return merged


def _pooled_interval(rates: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    return wilson(fmean(rate for rate, *_ in rates), math.fsum(effective_answers(*rate) for rate in rates))
