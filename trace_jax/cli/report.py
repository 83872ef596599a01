"""`trace-jax report`: a page of plots of one run or of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display
from trace_jax.files import require_writable


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML file; by default report.html in the run, or comparison.html in the first of several.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a self-contained HTML page, and an overview as PNG beside it."""
    page = out or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    if out is not None:
        require_writable(out)

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.report.build import report as build_report

        display.announce(f"drawing {', '.join(map(str, runs))}")
        build_report(runs, page)
        return {"html": page, "png": page.with_suffix(".png")}

    run_and_show(work, lambda result: typer.echo(f"report: {result['html']}"), json=json)
