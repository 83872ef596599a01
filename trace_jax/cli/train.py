"""`trace-jax train`: RL training of a configuration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import ConfigFile, Json, Overrides, RunFolder
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display
from trace_jax.files import require_writable


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder from its last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration and the memory plan, stop.")
    ] = False,
    json: Json = False,
) -> None:
    """Train with RL: FP4 rollout, guided fake quantization, GRPO."""
    from trace_jax.config import check_for_training, load

    settings = load(config, overrides or [])
    check_for_training(settings)

    from trace_jax.sharding.processes import is_first, join, on_first

    join()  # before anything asks jax for its devices
    if dry_run:
        from trace_jax.train.dry_run import plan_run, print_plan

        run_and_show(lambda display: plan_run(settings), lambda plan: print_plan(settings, plan["memory"]), json=json)
        return

    from trace_jax.train.run_folder import run_directory

    directory = run_directory(out, config.stem, resume=resume)
    on_first(lambda: require_writable(directory))

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.train.run import run_training

        report = display.steps("training", settings.steps) if is_first() else None
        ended = run_training(settings, directory, resume=resume, report=report)
        return {"run": directory, "metrics": ended.metrics}

    def show(result: dict[str, Any]) -> None:
        if is_first() and directory.is_dir():  # a stop before the start leaves nothing
            typer.echo(f"run: {result['run']}")

    run_and_show(work, show, json=json and is_first())
