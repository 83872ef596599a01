"""One look for every figure."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.report.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, TEAL, VIOLET, YELLOW, GREY = "#2f6fde", "#e8743b", "#13a08b", "#8b5cc7", "#d6a419", "#9aa5b1"
ROSE, BROWN, OLIVE, SKY = "#d0487f", "#8a5a36", "#6f8f1f", "#4fb3e0"
COLORS = (BLUE, ORANGE, TEAL, VIOLET, YELLOW, GREY, ROSE, BROWN, OLIVE, SKY)

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlecolor": INK,
    "axes.labelsize": 9,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#cbd2d9",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.02,
    "axes.ymargin": 0.12,
    "grid.color": GRID,
    "grid.linewidth": 0.9,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def new_figure(width: float, height: float) -> "Figure":
    """A figure without pyplot: no global state, no display. Use it inside ``styled()``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=170, layout="constrained")


def styled():
    """Context in which figures get this look.

    Raises:
        UserError: if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("report: figures need the package matplotlib; pip install matplotlib") from error
    return matplotlib.rc_context(cast(Any, STYLE))


def not_recorded(axes: "Axes") -> None:
    """Says that the runs lack the metric, instead of showing an empty plot."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_facecolor("#f7f8fa")
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=10)


def heading(axes: "Axes", title: str, note: str) -> None:
    """A title, and under it in small what the panel shows."""
    axes.set_title(title, pad=25)
    axes.annotate(note, (0, 1), xycoords="axes fraction", xytext=(0, 11), textcoords="offset points", fontsize=8.5, color=MUTED)


def trend(
    axes: "Axes", series: Series, color: str, label: str | None = None, *, linestyle: str = "-", log: bool = False, smooth: bool = True
) -> None:
    """Every step as a thin line and their moving average (geometric on a log axis) as a thick one.

    With few points, or where the average would invent values that a schedule never had (``smooth`` false), one line.
    """
    steps, values = series.steps, series.values
    few = len(steps) < 25
    if few or not smooth:
        axes.plot(steps, values, linestyle, color=color, label=label, marker="o" if few else "", markersize=3.5)
        return
    axes.plot(steps, values, "-", color=color, alpha=0.22, linewidth=0.9)
    axes.plot(steps, moving_average(values, log=log), linestyle, color=color, label=label)


def moving_average(values: Float[np.ndarray, " steps"], *, log: bool = False) -> Float[np.ndarray, " steps"]:
    """Centred moving average over a tenth of the series; windows are cut at the ends, so nothing is made up."""
    half = max(1, len(values) // 20)
    scaled = np.log(values) if log else values
    total = np.concatenate([[0.0], np.cumsum(scaled)])
    index = np.arange(len(values))
    start, stop = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    average = (total[stop] - total[start]) / (stop - start)
    return np.exp(average) if log else average


def integer_steps(axes: "Axes") -> None:
    """Whole numbers on the step axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step")


def percentages(axes: "Axes") -> None:
    """Tick labels of fractions as percentages."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def short_numbers(axes: "Axes") -> None:
    """Tick labels without trailing zeros: 0.0004 and 10,000."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def legend(axes: "Axes") -> None:
    """A legend below the panel, where it hides no data, if there is something to tell apart."""
    from matplotlib.transforms import ScaledTranslation

    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        below = axes.transAxes + ScaledTranslation(-0.05, -0.45, _figure(axes).dpi_scale_trans)  # under the ticks and the axis label
        columns = _legend_columns(axes, labels)
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=columns, fontsize=8, columnspacing=1.4)


def legend_height(axes: "Axes") -> float:
    """Inches that the legend below a panel takes."""
    labels = axes.get_legend_handles_labels()[1]
    return 0.1 + 0.16 * -(-len(labels) // _legend_columns(axes, labels)) if len(labels) > 1 else 0.0


def _legend_columns(axes: "Axes", labels: list[str]) -> int:
    room = 1.12 * axes.get_position().width * _figure(axes).get_figwidth()  # the layout gives a panel about that much
    entry = 0.5 + 0.062 * max(map(len, labels))  # inches of the widest: its line, and its text at 8 points
    return max(1, min(len(labels), int(room / entry)))


def _figure(axes: "Axes") -> "Figure":
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes are drawn into one
    return figure
