"""`trace-jax compare`: the same training under several methods and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import ConfigFile, Json, Overrides, RunFolder
from trace_jax.cli.common import run_and_show, split_names
from trace_jax.cli.progress import Display
from trace_jax.files import require_writable


def compare(
    config: ConfigFile,
    overrides: Overrides = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="Comma-separated presets, and variants of --variants; bf16,naive,qat,trace, or all variants by default."
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option("--variants", help="YAML file that names further methods: NAME: {config keys}, such as other layers or bits kept."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds of each method, from the config's seed on.")] = 1,
    out: RunFolder = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in the folder; it may have more methods or seeds than before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the runs and their memory plans, stop.")] = False,
    json: Json = False,
) -> None:
    """Train with several methods and seeds from one cold start: one table, comparison.json, plots and a page."""
    from trace_jax.comparison.plan import plan_comparison

    comparison = plan_comparison(config, overrides or [], names=split_names(methods), file=variants, seeds=seeds)
    if dry_run:
        from trace_jax.comparison.dry_run import plan_runs, print_runs

        run_and_show(lambda display: plan_runs(comparison, display.announce), print_runs, json=json)
        return

    from trace_jax.comparison.state import STATE
    from trace_jax.train.run_folder import run_directory

    directory = run_directory(out, f"{config.stem}-compare", resume=resume, marker=STATE)
    require_writable(directory)

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.comparison.run import run_comparison

        figures = run_comparison(comparison, directory, resume=resume, announce=display.announce, progress=display.progress)
        return {"out": directory, "comparison": figures}

    def show(result: dict[str, Any]) -> None:
        if result["comparison"] is not None:
            from trace_jax.comparison.page import HTML
            from trace_jax.comparison.table import print_comparison

            print_comparison(result["comparison"])
            typer.echo(f"comparison: {directory / HTML}")

    run_and_show(work, show, json=json)
