"""The figure of the quickstart: up to four panels that answer what the run is about."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trace_jax.files import write_atomic
from trace_jax.report import bars, plots
from trace_jax.report.html import png_bytes
from trace_jax.report.run_summary import Summary
from trace_jax.report.series import Run
from trace_jax.report.style import BLUE, COLORS, GREY, INK, MUTED, heading, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def quickstart_figure(run: Run, summary: Summary, out_png: str | os.PathLike[str]) -> Path:
    """Pass rate before and after, KL guided and unguided, bytes per token, code agreement by layer: one PNG.

    A panel without data is left out, such as the record of a method that has none.

    Args:
        run: its metrics give the curves.
        summary: the figures of the run, from `summarise`.
        out_png: written atomically.

    Returns:
        The path of the PNG.

    Raises:
        UserError: if the file cannot be written.
    """
    panels = _panels(run, summary)
    rows = 2 if len(panels) > 2 else 1
    with styled():
        figure = new_figure(11.0, 4.0 * rows + 0.4)
        places = figure.subplots(rows, 2, width_ratios=(1, 1.35), squeeze=False).ravel()
        for axes, draw in zip(places, panels, strict=False):
            draw(axes)
        for axes in places[len(panels) :]:
            axes.remove()
        # The strip above the panels belongs to the title and the subtitle, which the layout does not know.
        strip = 0.9 / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 0.99 - strip), w_pad=0.1, h_pad=0.1, wspace=0.06, hspace=0.08)  # type: ignore[union-attr]
        title = figure.text(0.02, 1 - 0.32 * strip, figure_title(summary), va="top", fontsize=16, fontweight="bold")
        subtitle = figure.text(0.02, 1 - 0.74 * strip, figure_subtitle(summary), va="top", fontsize=10, color=MUTED)
        for text in (title, subtitle):
            text.set_in_layout(False)
        picture = png_bytes(figure)
    path = Path(out_png)
    write_atomic(path, [picture], parents=True)
    return path


def figure_title(summary: Summary) -> str:
    """What ran."""
    return f"{summary.task}, method {summary.method}, seed {summary.seed}"


def figure_subtitle(summary: Summary) -> str:
    """What the rollout and the trainer round."""
    return f"rollout: {summary.rollout}; trainer: {summary.trainer}"


def _panels(run: Run, summary: Summary) -> list[Callable[["Axes"], None]]:
    found = [
        (summary.evaluations, lambda axes: _draw_evaluations(axes, summary)),
        (summary.gaps, lambda axes: _draw_gaps(axes, run, summary)),
        (summary.bytes_per_token, lambda axes: _draw_bytes(axes, summary)),
        (summary.code_agreement, lambda axes: _draw_agreement(axes, run)),
    ]
    return [draw for data, draw in found if data]


def _draw_evaluations(axes: "Axes", summary: Summary) -> None:
    when = "before and after RL" if len(summary.evaluations) > 1 else "one evaluation"
    heading(axes, "Held-out pass rate at rollout precision", f"{when}, with the 95 % interval")
    for x, (rate, color) in enumerate(zip(summary.evaluations, (GREY, BLUE), strict=False)):
        value = rate.pass_at_1
        axes.bar(x, value, width=0.52, color=color)
        axes.errorbar(x, value, [[value - rate.low], [rate.high - value]], fmt="none", ecolor=INK, elinewidth=1.3, capsize=4)
        axes.annotate(
            f"{value:.2f}", (x, rate.high), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=12, fontweight="bold"
        )
    axes.set_xticks(range(len(summary.evaluations)), [f"step {rate.step}" for rate in summary.evaluations], fontsize=10)
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(0.0, 1.08)
    axes.set_ylabel(f"pass@1, {summary.split} split")


def _draw_gaps(axes: "Axes", run: Run, summary: Summary) -> None:
    medians = {gap.metric: gap.k3_kl for gap in summary.gaps}
    lines = [replace(line, label=f"{line.label}: {medians[line.key]:.2e}") for line in plots.mismatch_lines(run) if line.key in medians]
    plots.draw_lines(axes, [run], lines, unit="KL (k3), nats per token, log scale", log=True)
    # One line has no legend, so its figure goes here.
    figures = "figures" if len(lines) > 1 else lines[0].label
    heading(axes, "Gap between rollout and trainer: lower is closer", f"KL on the sampled tokens; {figures}, {summary.window}")


def _draw_agreement(axes: "Axes", run: Run) -> None:
    plots.draw_audit(axes, [run], "code_agreement", unit="share of values")
    heading(axes, "Values that both round to the same code", "newest audit, by site and layer")


def _draw_bytes(axes: "Axes", summary: Summary) -> None:
    heading(axes, "Size of the guidance record", "what the rollout hands to the trainer, bytes per token")
    whole = sum(summary.bytes_per_token.values())
    parts = {name: size for name, size in bars.record_parts(summary.bytes_per_token).items() if size >= bars.SLIVER * whole}
    names, sizes = list(parts), np.array(list(parts.values()), np.float64)
    rows = range(len(names))
    axes.barh(rows, sizes, height=0.55, color=[COLORS[i % len(COLORS)] for i in rows])
    for row, size in zip(rows, sizes, strict=True):
        axes.annotate(
            f"{size:,.0f} B  ({size / whole:.0%})", (size, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(rows, names, color=INK, fontsize=9.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, sizes.max() * 1.38)
    axes.grid(False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"{whole:,.0f} bytes per token in all")
