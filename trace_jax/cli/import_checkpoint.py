"""`trace-jax import`: a Hugging Face checkpoint becomes an Orbax one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import json_output


def import_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and safetensors files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint; must not exist.")],
    json: Json = False,
) -> None:
    """Import Hugging Face safetensors strictly: every parameter filled, every tensor used."""
    from trace_jax.train.import_checkpoint import import_hf_checkpoint

    with json_output(json) as emit:
        result = import_hf_checkpoint(source, out)
        emit(result)
    if not json:
        typer.echo(f"checkpoint: {out}")
