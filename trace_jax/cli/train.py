"""`trace-jax train`: RL training of a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from trace_jax.cli.arguments import ConfigFile, OutFolder, Overrides


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    out: OutFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder from its last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration and the memory plan, stop.")
    ] = False,
) -> None:
    """Train with RL: FP4 rollout, guided fake quantization, GRPO."""
    from trace_jax.config import check_for_training, load

    settings = load(config, overrides or [])
    check_for_training(settings)
    if dry_run:
        from trace_jax.train.dry_run import print_plan

        print_plan(settings)
        return

    from trace_jax.cli.step_log import step_log
    from trace_jax.train.run import run_directory, run_training

    directory = run_directory(out, config.stem, resume=resume)
    with step_log("training", settings.steps) as report:
        run_training(settings, directory, resume=resume, report=report)
    typer.echo(f"run: {directory}")
