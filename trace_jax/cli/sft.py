"""`trace-jax sft`: the supervised cold start of a configuration."""

from __future__ import annotations

from typing import Any

import typer

from trace_jax.cli.arguments import ConfigFile, Json, Overrides, RunFolder
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display
from trace_jax.files import require_writable


def sft(config: ConfigFile, overrides: Overrides = None, out: RunFolder = None, json: Json = False) -> None:
    """Train on the task's worked answers, and write a checkpoint that `train` starts from."""
    from trace_jax.config import load
    from trace_jax.sharding.processes import is_first, join, on_first

    settings = load(config, overrides or [])
    join()  # before anything asks jax for its devices

    from trace_jax.train.run_folder import run_directory

    directory = run_directory(out, f"{config.stem}-sft", resume=None)
    on_first(lambda: require_writable(directory))

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.train.run_sft import run_sft

        report = display.steps("cold start", settings.sft.steps) if is_first() else None
        ended = run_sft(settings, directory, report)
        return {"checkpoint": directory, "metrics": ended.metrics}

    def show(result: dict[str, Any]) -> None:
        if is_first() and directory.is_dir():  # a stop before the start leaves nothing
            typer.echo(f"checkpoint: {result['checkpoint']}")

    run_and_show(work, show, json=json and is_first())
