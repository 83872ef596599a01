"""The figure of the quickstart: four panels that answer what the run is about."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_jax.files import write_atomic
from trace_jax.report import bars, plots
from trace_jax.report.html import png_bytes
from trace_jax.report.series import Run, load_runs
from trace_jax.report.style import BLUE, COLORS, GREY, INK, MUTED, heading, new_figure, not_recorded, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bar = tuple[float, float, float]
"""A reward with its interval: (value, low, high)."""


def quickstart_figure(run_dir: str | os.PathLike[str], summary: Mapping[str, Any], out_png: str | os.PathLike[str]) -> Path:
    """Reward before and after, KL guided and unguided, code agreement by layer, bytes per token: one PNG.

    Args:
        run_dir: the run; its metrics give the curves, and whatever ``summary`` does not give.
        summary: all keys optional. ``title`` and ``subtitle`` text; ``before`` and ``after``, each a mapping with ``value`` and
            optionally ``low`` and ``high``; ``reward_label`` for the axis; ``bytes_per_token`` as {part: bytes}.
        out_png: written atomically.

    Returns:
        The path of the PNG.

    Raises:
        UserError: if the run cannot be read or the file not be written.
    """
    (run,) = load_runs([run_dir])
    with styled():
        figure = new_figure(11.0, 8.0)
        top, bottom = figure.subplots(2, 2, width_ratios=(1, 1.35))
        _draw_before_after(top[0], run, summary)
        plots.draw_lines(top[1], [run], partial(plots.mismatch_lines, medians=True), unit="KL (k3), nats per token, log scale", log=True)
        heading(top[1], "Gap between rollout and trainer", "KL on the sampled tokens: lower is closer")
        _draw_bytes(bottom[0], summary.get("bytes_per_token") or run.bytes_per_token())
        plots.draw_audit(bottom[1], [run], "code_agreement", unit="share of values")
        heading(bottom[1], "Values that both round to the same FP4 code", "newest audit, by layer; the record covers the deeper layers")
        # The strip above the panels belongs to the title and the subtitle, which the layout does not know.
        figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 0.88), w_pad=0.1, h_pad=0.1, wspace=0.06, hspace=0.08)  # type: ignore[union-attr]
        title = figure.text(0.02, 0.965, summary.get("title", run.name), va="top", fontsize=16, fontweight="bold")
        subtitle = figure.text(0.02, 0.92, summary.get("subtitle", ""), va="top", fontsize=10, color=MUTED)
        for text in (title, subtitle):
            text.set_in_layout(False)
        picture = png_bytes(figure)
    path = Path(out_png)
    write_atomic(path, [picture], parents=True)
    return path


def _draw_before_after(axes: "Axes", run: Run, summary: Mapping[str, Any]) -> None:
    bars, label = _bars(run, summary)
    heading(axes, "Held-out reward at FP4 rollout", "before and after RL, with the 95 % interval")
    if not bars:
        not_recorded(axes)
        return
    for x, ((value, low, high), color) in enumerate(zip(bars, (GREY, BLUE), strict=False)):
        axes.bar(x, value, width=0.52, color=color)
        if high > low:
            axes.errorbar(x, value, [[value - low], [high - value]], fmt="none", ecolor=INK, elinewidth=1.3, capsize=4)
        axes.annotate(f"{value:.2f}", (x, high), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=12, fontweight="bold")
    axes.set_xticks(range(len(bars)), ["before", "after"][: len(bars)], fontsize=10)
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(min(0.0, *(low for _, low, _ in bars)), max(1.0, *(high for *_, high in bars)) * 1.08)
    axes.set_ylabel(label)


def _bars(run: Run, summary: Mapping[str, Any]) -> tuple[list[Bar], str]:
    given = [summary[name] for name in ("before", "after") if summary.get(name)]
    if given:
        bars = [(float(b["value"]), float(b.get("low", b["value"])), float(b.get("high", b["value"]))) for b in given]
        return bars, summary.get("reward_label", "reward")
    if not run.evaluations():
        return [], ""
    split, what = run.evaluations()[0]
    points = run.series(f"eval/{split}/{what}")
    low, high = plots.interval(run, split, what, points)
    ends = [0, -1] if len(points.steps) > 1 else [0]
    label = {"pass_at_1": "pass@1", "reward_mean": "reward"}[what]
    return [(float(points.values[i]), float(low[i]), float(high[i])) for i in ends], f"{label}, {split} split"


def _draw_bytes(axes: "Axes", parts: Mapping[str, float]) -> None:
    heading(axes, "Size of the guidance record", "what the rollout hands to the trainer, bytes per token")
    if not parts:
        not_recorded(axes)
        return
    parts = {name: size for name, size in bars.record_parts(parts).items() if size >= bars.SLIVER * sum(parts.values())}
    names, sizes = list(parts), np.array(list(parts.values()), np.float64)
    rows = range(len(names))
    axes.barh(rows, sizes, height=0.55, color=[COLORS[i % len(COLORS)] for i in rows])
    for row, size in zip(rows, sizes, strict=True):
        axes.annotate(
            f"{size:,.0f} B  ({size / sizes.sum():.0%})", (size, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(rows, names, color=INK, fontsize=9.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, sizes.max() * 1.38)
    axes.grid(False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"{sizes.sum():,.0f} bytes per token in all")
