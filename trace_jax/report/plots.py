"""The panels of the report: each draws one question into given axes, for one run or several.

With one run colours tell the lines apart; with several each run has one colour and line styles tell the lines apart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from trace_jax.report.series import Run, Series
from trace_jax.report.style import (
    BLUE,
    COLORS,
    ORANGE,
    TEAL,
    integer_steps,
    legend,
    not_recorded,
    percentages,
    short_numbers,
    trend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Line:
    """One metric of a panel."""

    key: str
    label: str
    color: str = BLUE
    linestyle: str = "-"
    smooth: bool = True


NAMES = {"pass_at_1": "pass rate", "reward_mean": "reward"}
"""What an evaluation measured, in words."""

Lines = Sequence[Line] | Callable[[Run], Sequence[Line]]


def draw_lines(axes: "Axes", runs: Sequence[Run], lines: Lines, *, unit: str, log: bool = False, share: bool = False) -> None:
    """Metrics over steps; ``lines`` may depend on the run. A log axis leaves out zeros; a line of zeros says so in the legend.

    Args:
        unit: label of the value axis.
        share: the values are fractions, shown as percentages.
    """
    found: list[tuple[int, str, Line, Series]] = []
    for index, run in enumerate(runs):
        chosen = lines(run) if callable(lines) else lines
        for line in chosen:
            series = run.series(line.key)
            label = line.label if len(runs) == 1 else run.name if len(chosen) == 1 else f"{run.name} · {line.label}"
            if series:
                found.append((index, label, line, series))
    if not found:
        not_recorded(axes)
        return
    nonzero = any(series.values.any() for *_, series in found)
    log = log and any((series.values > 0).any() for *_, series in found)
    for index, label, line, series in found:
        color, linestyle = (line.color, "-") if len(runs) == 1 else (COLORS[index % len(COLORS)], line.linestyle)
        label = label if series.values.any() else f"{label}: always 0"
        if log:
            positive = series.values > 0
            series = Series(series.steps[positive], series.values[positive])
        if series:
            trend(axes, series, color, label, linestyle=linestyle, log=log, smooth=line.smooth)
        else:
            axes.plot([], [], linestyle, color=color, label=label)
    if log:
        axes.set_yscale("log")
    elif not nonzero:
        axes.set_ylim(-0.02, 1)  # around a line of zeros the axis would show negative values, which there are none of
    if share:
        percentages(axes)
    elif not log:
        short_numbers(axes)
    axes.set_ylabel(unit)
    integer_steps(axes)
    legend(axes)


def draw_reward(axes: "Axes", runs: Sequence[Run]) -> None:
    """Training reward as a trend, held-out evaluations as points with their confidence interval."""
    drawn = False
    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)] if len(runs) > 1 else BLUE
        prefix = f"{run.name} · " if len(runs) > 1 else ""
        reward = run.series("reward/mean") or run.series("reward/pass_rate")
        if reward:
            trend(axes, reward, color, prefix + "training prompts")
        drawn |= bool(reward)
        for split, what in run.evaluations()[:1]:
            points = run.series(f"eval/{split}/{what}")
            precision = run.text(f"eval/{split}/precision")
            label = prefix + f"{split} split" + (f", {precision}" if precision else "")
            draw_evaluation(axes, run, split, what, points, color if len(runs) > 1 else ORANGE, label)
            drawn = True
    if not drawn:
        not_recorded(axes)
        return
    points = sorted({NAMES[what] for run in runs for _, what in run.evaluations()[:1]})
    axes.set_ylabel(f"reward (line), {' and '.join(points)} (points)" if points else "reward")
    integer_steps(axes)
    legend(axes)


def draw_evaluation(axes: "Axes", run: Run, split: str, what: str, points: Series, color: str, label: str) -> None:
    """Evaluation points, with bars where the interval was recorded."""
    low, high = interval(run, split, what, points)
    errors = np.stack([points.values - low, high - points.values])
    axes.errorbar(
        points.steps, points.values, errors, fmt="o", color=color, markersize=6, markeredgecolor="white",
        elinewidth=1.4, capsize=0, zorder=4, label=label,
    )  # fmt: skip


def interval(run: Run, split: str, what: str, points: Series) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """The recorded confidence interval at each point; the point itself where there is none."""
    bounds = []
    for end in ("low", "high"):
        series = run.series(f"eval/{split}/{what}_{end}")
        known = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        bounds.append(np.array([known.get(step, value) for step, value in zip(points.steps.tolist(), points.values, strict=True)]))
    return np.minimum(bounds[0], points.values), np.maximum(bounds[1], points.values)


def draw_audit(axes: "Axes", runs: Sequence[Run], what: str, *, unit: str, log: bool = False) -> None:
    """The newest audited figure by layer, one line a site: a share, or on a log axis a distance."""
    drawn = positive = False
    layers_seen: set[int] = set()
    for index, run in enumerate(runs):
        for number, (site, layers) in enumerate(run.audit(what).items()):
            drawn = True
            layers_seen |= set(layers)
            positive |= any(value > 0 for value in layers.values())
            color = COLORS[(number if len(runs) == 1 else index) % len(COLORS)]
            marker = "osD^vP"[number % 6]
            label = site if len(runs) == 1 else f"{run.name} · {site}"
            values = [math.nan if log and value == 0 else value for value in layers.values()]
            axes.plot(list(layers), values, color=color, marker=marker, markersize=5, linewidth=1.4, label=label)
    if not drawn:
        not_recorded(axes)
        return
    if log:
        if positive:  # an exact replay has distance 0 everywhere, which a log axis cannot show
            axes.set_yscale("log")
    else:
        percentages(axes)
        bottom, top = axes.get_ylim()
        margin = 0.04 * (top - bottom)
        axes.set_ylim(max(bottom, -margin), min(top, 1.0 + margin))  # no share beyond 0 and 1 on the axis
    if len(layers_seen) <= 16:
        axes.set_xticks(sorted(layers_seen))
    axes.set_xlabel("layer")
    axes.set_ylabel(unit)
    legend(axes)


def mismatch_lines(run: Run) -> tuple[Line, ...]:
    """The KL of the forward that trains, named for what it is, and of the forward without guidance."""
    trains = "guided forward" if run.guided() else "training forward, not guided"
    return (Line("rollout_corr/k3_kl", trains, BLUE, "-"), Line("unguided/rollout_corr/k3_kl", "unguided forward", ORANGE, "--"))


GAP_LINES = (
    Line("train_rollout_logprob_abs_diff", "mean", BLUE, "-"),
    Line("train_rollout_logprob_abs_diff_max", "largest", TEAL, "--"),
    Line("unguided/train_rollout_logprob_abs_diff", "mean, unguided", ORANGE, ":"),
)
SHARE_LINES = (
    Line("guidance/saturation_fraction", "values saturated", BLUE, "-"),
    Line("guidance/missing_fraction", "tokens without a record", ORANGE, "--"),
    Line("guidance/recomputed_fraction", "tokens recomputed", TEAL, ":"),
)
