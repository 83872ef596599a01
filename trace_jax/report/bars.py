"""The panels that are bars: what the record and the time of a step consist of."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trace_jax.report.series import Run
from trace_jax.report.style import COLORS, GREY, INK, not_recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLIVER = 0.005
"""Smallest share of a bar that is drawn and named."""


def draw_bytes(axes: "Axes", runs: Sequence[Run]) -> None:
    """Size of the record per token, split by site, one bar a run."""
    sizes = [record_parts(run.bytes_per_token()) for run in runs]
    if not any(sizes):
        not_recorded(axes)
        return
    stacked_bars(axes, [run.name for run in runs], sizes, unit="B", total_format="{:,.0f}")
    axes.set_xlabel("bytes per token")


def record_parts(sizes: Mapping[str, float]) -> dict[str, float]:
    """The parts of the record the largest first; `rows` is the validity and version of each token."""
    return {"validity, version" if part == "rows" else part: sizes[part] for part in sorted(sizes, key=lambda part: -sizes[part])}


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
    order = ("rollout", "reward", "audit", "train", "sync", "evaluate", "checkpoint")
    parts = {name: parts[name] for name in sorted(parts, key=lambda n: (order.index(n) if n in order else len(order), n))}
    step = run.series("time/step")
    if step and step.median() > sum(parts.values()) * 1.005:
        parts["other"] = step.median() - sum(parts.values())
    return parts


def stacked_bars(axes: "Axes", names: Sequence[str], parts: Sequence[dict[str, float]], *, unit: str, total_format: str) -> None:
    """Horizontal bars of named parts, the total at the end; parts keep their colour over the bars. Slivers are not drawn."""
    totals = [sum(split.values()) for split in parts]
    labels = [
        label
        for label in dict.fromkeys(label for split in parts for label in split)
        if any(split.get(label, 0.0) >= SLIVER * total for split, total in zip(parts, totals, strict=True))
    ]
    left = np.zeros(len(names))
    for number, label in enumerate(labels):
        widths = np.array([split.get(label, 0.0) for split in parts])
        axes.barh(range(len(names)), widths, left=left, height=0.5, color=COLORS[number % len(COLORS)], label=label, edgecolor="white")
        left += widths
    for row, total in enumerate(totals):
        text = f"{total_format.format(total)} {unit}" if parts[row] else "not recorded"
        color, weight = (INK, "bold") if parts[row] else (GREY, "normal")
        axes.annotate(text, (total, row), color=color, fontweight=weight, xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names if len(names) > 1 else [""])
    axes.set_ylim(len(names) - 0.45, -1.15)  # room above the first bar for the legend
    axes.set_xlim(0, max(totals) * 1.18 or 1.0)
    axes.grid(visible=False)
    axes.legend(loc="upper left", ncols=len(labels), columnspacing=1.2, handlelength=1.0, borderpad=0.2)
