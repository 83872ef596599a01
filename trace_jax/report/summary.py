"""The summary table of the report: one column a run."""

import math
from collections.abc import Sequence

import numpy as np

from trace_jax.report.plots import interval
from trace_jax.report.series import Run

MISSING = "not recorded"


def summary_table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows of (label, one text a run). Figures over steps are medians, so one outlier does not decide them."""
    rows: list[tuple[str, list[str]]] = [("Method", [str(run.config.get("method", MISSING)) for run in runs])]
    rows.append(("Last step", [str(run.rows[-1]["step"]) for run in runs]))
    for split, what in sorted({pair for run in runs for pair in run.evaluations()}):
        name = {"pass_at_1": "pass@1", "reward_mean": "reward"}[what]
        rows.append((f"Held-out {name} ({split}), before → after", [_before_after(run, split, what) for run in runs]))
    rows += [
        (
            "Training reward, last 10 steps",
            [_number((run.series("reward/mean") or run.series("reward/pass_rate")).tail_mean()) for run in runs],
        ),
        ("KL (k3) of the forward that trains, median", [_training_kl(run) for run in runs]),
        (
            "KL (k3) of the unguided forward, median",
            [_number(run.series("unguided/rollout_corr/k3_kl").median(), "{:.2e}") for run in runs],
        ),
        ("Largest log-prob gap", [_number(_largest(run, "train_rollout_logprob_abs_diff_max"), "{:.2f}") for run in runs]),
        ("Audited code agreement, mean over layers and sites", [_number(_audit_mean(run), "{:.2%}") for run in runs]),
        ("Record, bytes per token", [_number(sum(run.bytes_per_token().values()) or math.nan, "{:,.0f}") for run in runs]),
        ("Time per step, median", [_number(run.series("time/step").median(), "{:.2f} s") for run in runs]),
    ]
    return rows


def _before_after(run: Run, split: str, what: str) -> str:
    points = run.series(f"eval/{split}/{what}")
    if not points:
        return MISSING
    low, high = interval(run, split, what, points)

    def one(i: int) -> str:
        value = f"{points.values[i]:.3f}"
        return value + (f" [{low[i]:.3f}, {high[i]:.3f}]" if high[i] > low[i] else "")

    if len(points.steps) == 1:
        return f"{one(0)} (step {points.steps[0]} only)"
    return f"{one(0)} → {one(-1)}"


def _training_kl(run: Run) -> str:
    text = _number(run.series("rollout_corr/k3_kl").median(), "{:.2e}")
    return text if text == MISSING else f"{text} ({'guided' if run.guided() else 'not guided'})"


def _largest(run: Run, key: str) -> float:
    series = run.series(key)
    return float(series.values.max()) if series else math.nan


def _audit_mean(run: Run) -> float:
    values = [value for layers in run.audit("code_agreement").values() for value in layers.values()]
    return float(np.mean(values)) if values else math.nan


def _number(value: float, form: str = "{:.3f}") -> str:
    return form.format(value) if math.isfinite(value) else MISSING
