"""`trace-jax import`: a Hugging Face checkpoint becomes an Orbax one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display


def import_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and safetensors files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint; must not exist.")],
    json: Json = False,
) -> None:
    """Import Hugging Face safetensors strictly: every parameter filled, every tensor used."""

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.train.import_checkpoint import import_hf_checkpoint

        display.announce(f"importing {source}")
        return import_hf_checkpoint(source, out)

    run_and_show(work, lambda result: typer.echo(f"checkpoint: {result['checkpoint']} (tokenizer: {result['tokenizer']})"), json=json)
