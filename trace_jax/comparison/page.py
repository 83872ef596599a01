"""The pictures of a comparison, and its page: the panels of `trace-jax report` with one curve a method, below what the methods reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trace_jax.comparison.pooling import mean_run
from trace_jax.comparison.table import NONE, RATE, cells, notes
from trace_jax.files import write_atomic
from trace_jax.report.build import overview
from trace_jax.report.html import FOOTER, png_bytes, render_html
from trace_jax.report.sections import SECTIONS, Panel, Section
from trace_jax.report.series import Run, load_runs
from trace_jax.report.style import COLORS, INK, MUTED, heading, new_figure, not_recorded, styled
from trace_jax.report.summary import MISSING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HTML, CURVES, METHODS = "comparison.html", "comparison.png", "methods.png"


def write_page(figures: Mapping[str, Any], out: Path) -> None:
    """Writes the page, the overview of the curves and the picture of what the methods reached, each atomically.

    Args:
      figures: what `comparison.json` holds.
      out: the folder of the comparison.

    Raises:
      UserError: a run or file cannot be read or written.
    """
    runs = [
        mean_run(name, load_runs([out / run["run"] for run in entry["runs"]]), figures["split"])
        for name, entry in figures["methods"].items()
    ]
    with styled():
        page = render_html(
            runs,
            title="trace-jax compare",
            summary=summary_rows(figures),
            sections=(Section("Methods", method_panels(figures)), *SECTIONS),
            footer=" ".join((*notes(figures), "Curves are means over the seeds.", FOOTER)),
        )
        curves, reached = overview(runs), _methods_picture(figures, runs)
    write_atomic(out / CURVES, [curves])
    write_atomic(out / METHODS, [reached])
    write_atomic(out / HTML, [page.encode()])


def summary_rows(figures: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The table of the page: what the rollout and the trainer round, then the columns of the table, each seed's pass rate among them."""
    entries = list(figures["methods"].values())
    texts = [cells(entry) for entry in entries]
    rows = [(what, [entry[what] for entry in entries]) for what in ("rollout", "trainer")]
    for column in texts[0]:
        rows.append(
            (" ".join(column.split()), [MISSING if text[column] == NONE and column != "collapse" else text[column] for text in texts])
        )
    for index, seed in enumerate(figures["seeds"] if len(figures["seeds"]) > 1 else ()):
        label = f"{RATE}, seed {seed}"
        rows.append((label, [cells(entry["runs"][index])[RATE] for entry in entries]))
    return rows


def method_panels(figures: Mapping[str, Any]) -> tuple[Panel, Panel]:
    """What each method reached, and how far its trainer was from its rollout."""
    entries = figures["methods"]
    return (
        Panel(
            "Held-out pass rate after training",
            "Filled: rollout at its own precision, with the 95 % interval of all seeds' answers. Open: the same weights with nothing "
            "rounded in the rollout. Dots: single seeds.",
            _drawn(_draw_rates, entries),
            overview="filled: at rollout precision with its 95 % interval; open: at bf16; dots: seeds",
        ),
        Panel(
            "KL of rollout and trainer at the end",
            "K3 estimate on sampled tokens, log scale. Filled: the forward without guidance. Open: the guided forward, which replays the "
            "rollout's rounding. Dots: single seeds.",
            _drawn(_draw_kl, entries),
            overview="filled: unguided forward; open: guided forward; dots: seeds",
        ),
    )


def _drawn(draw: Callable[[Axes, Mapping[str, Any]], None], entries: Mapping[str, Any]) -> Callable[[Axes, Sequence[Run]], None]:
    return lambda axes, runs: draw(axes, entries)


def _methods_picture(figures: Mapping[str, Any], runs: Sequence[Run]) -> bytes:
    figure = new_figure(11.0, 4.4)
    for axes, panel in zip(figure.subplots(1, 2), method_panels(figures), strict=True):
        heading(axes, panel.title, panel.overview)
        panel.draw(axes, runs)
    return png_bytes(figure)


def _draw_rates(axes: Axes, entries: Mapping[str, Any]) -> None:
    def rate(entry: Mapping[str, Any], name: str) -> float | None:
        return None if entry[name] is None else entry[name]["pass_at_1"]

    _draw_pairs(axes, entries, partial(rate, name="after"), partial(rate, name="after_bf16"), bars=True)
    for x, entry in enumerate(entries.values()):
        if entry["after"] is not None:
            value, low, high = (entry["after"][name] for name in ("pass_at_1", "low", "high"))
            axes.errorbar(x - 0.2, value, [[value - low], [high - value]], fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("pass@1")


def _draw_kl(axes: Axes, entries: Mapping[str, Any]) -> None:
    def kl(entry: Mapping[str, Any], forward: str) -> float | None:
        gap = entry["gaps"][forward]
        return None if gap is None or gap["k3_kl"] <= 0 else gap["k3_kl"]  # a log axis has no place for an exact replay

    _draw_pairs(axes, entries, partial(kl, forward="unguided"), partial(kl, forward="guided"), bars=False)
    if any(kl(entry, forward) for entry in entries.values() for forward in ("unguided", "guided")):
        axes.set_yscale("log")
    axes.set_ylabel("nats per token, log scale")


def _draw_pairs(
    axes: Axes,
    entries: Mapping[str, Any],
    filled: Callable[[Mapping[str, Any]], float | None],
    open_: Callable[[Mapping[str, Any]], float | None],
    *,
    bars: bool,
) -> None:
    """Two bars a method, or two points where the axis has no zero, and the seeds as dots on them."""
    drawn = False
    for x, entry in enumerate(entries.values()):
        color = COLORS[x % len(COLORS)]
        for place, value_of, face in ((x - 0.2, filled, color), (x + 0.2, open_, "white")):
            value = value_of(entry)
            if value is None:
                continue
            drawn = True
            if bars:
                axes.bar(place, value, width=0.36, color=face, edgecolor=color, linewidth=1.6)
            else:
                axes.plot(place, value, "s", color=face, markeredgecolor=color, markersize=11, markeredgewidth=1.6)
            if len(entry["runs"]) > 1:
                seeds = [found for run in entry["runs"] if (found := value_of(run)) is not None]
                axes.plot([place] * len(seeds), seeds, "o", color=MUTED, markersize=4, markeredgecolor="white", zorder=5)
    if not drawn:
        not_recorded(axes)
        return
    axes.set_xticks(range(len(entries)), list(entries), rotation=0 if len(entries) <= 6 else 30)
    axes.set_xlim(-0.6, len(entries) - 0.4)
