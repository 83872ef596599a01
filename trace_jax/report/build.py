"""``trace-jax report``: from run directories to one HTML file and one PNG."""

import os
from collections.abc import Sequence
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.report.html import png_bytes, render_html
from trace_jax.report.sections import SECTIONS
from trace_jax.report.series import Run, load_runs
from trace_jax.report.style import heading, new_figure, styled

# Three rows of two; the last one holds the bars, which need less height.
_OVERVIEW = sorted((panel for section in SECTIONS for panel in section.panels if panel.overview), key=lambda panel: panel.bars)


def report(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Writes the report of one run, or of several over each other.

    Args:
        run_dirs: run directories with a ``metrics.jsonl``. Metrics that a run lacks are shown as "not recorded".
        out: the HTML file; an overview as PNG is written beside it, with the same name. Both are replaced atomically.

    Returns:
        The path of the HTML file.

    Raises:
        UserError: if a run cannot be read, or the files cannot be written.
    """
    runs = load_runs(run_dirs)
    path = Path(out)
    if path.suffix != ".html":
        raise UserError(f"{path}: the report is an HTML file; give a name that ends in .html")
    with styled():
        page, picture = render_html(runs), overview(runs)
    write_atomic(path.with_suffix(".png"), [picture], parents=True)
    write_atomic(path, [page.encode()], parents=True)
    return path


def overview(runs: Sequence[Run]) -> bytes:
    """The panels that matter most as one PNG. Use it inside ``styled()``."""
    figure = new_figure(11.0, 10.5)
    for axes, panel in zip(figure.subplots(3, 2, height_ratios=(1, 1, 0.7)).flat, _OVERVIEW, strict=True):
        heading(axes, panel.title, panel.overview)
        panel.draw(axes, runs)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.05)  # type: ignore[union-attr]
    return png_bytes(figure)
