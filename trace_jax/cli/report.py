"""`trace-jax report`: a page of plots of one run or of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import json_output


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; report.html in the first run by default.")] = None,
    json: Json = False,
) -> None:
    """Write a self-contained HTML page, and an overview as PNG beside it."""
    from trace_jax.report.build import report as build_report

    with json_output(json) as emit:
        page = build_report(runs, out or runs[0] / "report.html")
        emit({"html": page, "png": page.with_suffix(".png")})
    if not json:
        typer.echo(f"report: {page}")
