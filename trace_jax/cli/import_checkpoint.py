"""`trace-jax import`: a Hugging Face checkpoint becomes an Orbax one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display
from trace_jax.errors import UserError


def import_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and safetensors files, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint; must not exist.")],
    upcycle: Annotated[
        int | None, typer.Option("--upcycle", metavar="E", help="Make a mixture of E experts of a dense checkpoint; it computes the same.")
    ] = None,
    experts_per_token: Annotated[int, typer.Option("--experts-per-token", help="With --upcycle: experts that process a token.")] = 2,
    split: Annotated[
        bool, typer.Option("--split", help="With --upcycle: each expert holds a part of the dense layer instead of all of it.")
    ] = False,
    json: Json = False,
) -> None:
    """Import Hugging Face safetensors strictly: every parameter filled, every tensor used."""

    def work(display: Display) -> dict[str, Any]:
        from trace_jax.models.upcycled_files import Upcycling
        from trace_jax.train.import_checkpoint import import_hf_checkpoint

        if split and upcycle is None:
            raise UserError("--split says how experts are made; write --upcycle E as well")
        display.announce(f"importing {source}")
        return import_hf_checkpoint(source, out, None if upcycle is None else Upcycling(upcycle, experts_per_token, split))

    run_and_show(work, lambda result: typer.echo(f"checkpoint: {result['checkpoint']} (tokenizer: {result['tokenizer']})"), json=json)
