"""`trace-jax sft`: the supervised cold start of a configuration."""

from __future__ import annotations

import typer

from trace_jax.cli.arguments import ConfigFile, OutFolder, Overrides


def sft(config: ConfigFile, overrides: Overrides = None, out: OutFolder = None) -> None:
    """Train on the task's worked answers, and write a checkpoint that `train` starts from."""
    from trace_jax.cli.step_log import step_log
    from trace_jax.config import load
    from trace_jax.train.run import run_directory
    from trace_jax.train.run_sft import run_sft

    settings = load(config, overrides or [])
    directory = run_directory(out, f"{config.stem}-sft", resume=False)
    with step_log("cold start", settings.sft.steps) as report:
        run_sft(settings, directory, report)
    typer.echo(f"checkpoint: {directory}")
