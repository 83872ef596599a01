"""The panels of the report: each draws one question into given axes, for one run or several.

With one run colours tell the lines apart; with several each run has one colour and line styles tell the lines apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trace_jax.report.series import Run, Series
from trace_jax.report.style import BLUE, COLORS, GREY, INK, ORANGE, TEAL, integer_steps, legend, not_recorded, trend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", Sequence[Run]], None]


@dataclass(frozen=True)
class Line:
    """One metric of a panel."""

    key: str
    label: str
    color: str = BLUE
    linestyle: str = "-"


def draw_lines(axes: "Axes", runs: Sequence[Run], lines: Sequence[Line] | Callable[[Run], Sequence[Line]], *, log: bool = False) -> None:
    """Metrics over steps; ``lines`` may depend on the run. A log axis leaves out zeros and says so when a line has nothing else."""
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
    log = log and any((series.values > 0).any() for *_, series in found)
    for index, label, line, series in found:
        color, linestyle = (line.color, "-") if len(runs) == 1 else (COLORS[index % len(COLORS)], line.linestyle)
        if log:
            positive = series.values > 0
            series = Series(series.steps[positive], series.values[positive])
        if series:
            trend(axes, series, color, label, linestyle=linestyle, log=log)
        else:
            axes.plot([], [], linestyle, color=color, label=f"{label}: 0 at every step")
    if log:
        axes.set_yscale("log")
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
    integer_steps(axes)
    legend(axes)


def draw_evaluation(axes: "Axes", run: Run, split: str, what: str, points: Series, color: str, label: str) -> None:
    """Evaluation points joined by a line, with bars where the interval was recorded."""
    low, high = interval(run, split, what, points)
    errors = np.stack([points.values - low, high - points.values])
    axes.errorbar(
        points.steps, points.values, errors, fmt="o-", color=color, markersize=6, markeredgecolor="white", linewidth=1.2,
        elinewidth=1.4, capsize=0, zorder=4, label=label,
    )  # fmt: skip


def interval(run: Run, split: str, what: str, points: Series) -> tuple[np.ndarray, np.ndarray]:
    """The recorded confidence interval at each point; the point itself where there is none."""
    bounds = []
    for end in ("low", "high"):
        series = run.series(f"eval/{split}/{what}_{end}")
        known = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        bounds.append(np.array([known.get(step, value) for step, value in zip(points.steps.tolist(), points.values, strict=True)]))
    return np.minimum(bounds[0], points.values), np.maximum(bounds[1], points.values)


def draw_audit(axes: "Axes", runs: Sequence[Run], what: str, *, log: bool = False) -> None:
    """The newest audited figure by layer, one line a site: a share, or on a log axis a distance."""
    from matplotlib.ticker import PercentFormatter

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
            axes.plot(list(layers), list(layers.values()), color=color, marker=marker, markersize=5, linewidth=1.4, label=label)
    if not drawn:
        not_recorded(axes)
        return
    if log:
        if positive:  # an exact replay has distance 0 everywhere, which a log axis cannot show
            axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        bottom, top = axes.get_ylim()
        margin = 0.04 * (top - bottom)
        axes.set_ylim(max(bottom, -margin), min(top, 1.0 + margin))  # no share beyond 0 and 1 on the axis
    if len(layers_seen) <= 16:
        axes.set_xticks(sorted(layers_seen))
    axes.set_xlabel("layer")
    legend(axes)


def draw_bytes(axes: "Axes", runs: Sequence[Run]) -> None:
    """Size of the record per token, split by site, one bar a run."""
    sizes = [run.bytes_per_token() for run in runs]
    if not any(sizes):
        not_recorded(axes)
        return
    stacked_bars(axes, [run.name for run in runs], sizes, unit="B", total_format="{:,.0f}")
    axes.set_xlabel("bytes per token")


def draw_time(axes: "Axes", runs: Sequence[Run]) -> None:
    """Where the time of a step goes: the median of every part, one bar a run; the rest of the step is 'other'."""
    splits = [time_split(run) for run in runs]
    if not any(splits):
        not_recorded(axes)
        return
    stacked_bars(axes, [run.name for run in runs], splits, unit="s", total_format="{:.2f}")
    axes.set_xlabel("seconds per step (median)")


def time_split(run: Run) -> dict[str, float]:
    """Median seconds of every recorded part of a step."""
    parts = {key.removeprefix("time/"): run.series(key).median() for key in run.keys("time/") if key != "time/step"}
    order = ("rollout", "reward", "train", "sync", "checkpoint")
    parts = {name: parts[name] for name in sorted(parts, key=lambda n: (order.index(n) if n in order else len(order), n))}
    step = run.series("time/step")
    if step and step.median() > sum(parts.values()) * 1.005:
        parts["other"] = step.median() - sum(parts.values())
    return parts


def stacked_bars(axes: "Axes", names: Sequence[str], parts: Sequence[dict[str, float]], *, unit: str, total_format: str) -> None:
    """Horizontal bars of named parts, the total at the end; parts keep their colour over the bars."""
    labels = list(dict.fromkeys(label for split in parts for label in split))
    left = np.zeros(len(names))
    for number, label in enumerate(labels):
        widths = np.array([split.get(label, 0.0) for split in parts])
        axes.barh(range(len(names)), widths, left=left, height=0.5, color=COLORS[number % len(COLORS)], label=label, edgecolor="white")
        left += widths
    for row, total in enumerate(left):
        text = f"{total_format.format(total)} {unit}" if parts[row] else "not recorded"
        color, weight = (INK, "bold") if parts[row] else (GREY, "normal")
        axes.annotate(text, (total, row), color=color, fontweight=weight, xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names if len(names) > 1 else [""])
    axes.set_ylim(len(names) - 0.45, -1.15)  # room above the first bar for the legend
    axes.set_xlim(0, max(left) * 1.18 or 1.0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper left", ncols=len(labels), columnspacing=1.2, handlelength=1.0, borderpad=0.2)


def mismatch_lines(run: Run, *, medians: bool = False) -> tuple[Line, ...]:
    """The KL of the forward that trains, named for what it is, and of the forward without guidance."""
    unguided = "unguided/rollout_corr/k3_kl"
    trains = "guided forward" if run.guided() else "training forward, not guided"
    lines = (Line("rollout_corr/k3_kl", trains, BLUE, "-"), Line(unguided, "unguided forward", ORANGE, "--"))
    if not medians:
        return lines
    return tuple(replace(line, label=f"{line.label}, median {run.series(line.key).median():.1e}") for line in lines)


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
