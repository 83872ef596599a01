"""`trace-jax export`: an Orbax checkpoint becomes a Hugging Face directory that vLLM loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_jax.cli.arguments import Json, Overrides
from trace_jax.cli.common import run_and_show


def export(
    policy: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run folder, checkpoint folder, one step of it, or a Hugging Face folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder; must not exist.")],
    overrides: Overrides = None,
    format: Annotated[str, typer.Option("--format", help="nvfp4 (ModelOpt), mxfp4 (compressed-tensors) or bf16.")] = "nvfp4",
    scope: Annotated[
        str, typer.Option("--scope", help="routed_experts, or routed_experts:LAYERS with last_half, last:N, first:N or ids like 2,3.")
    ] = "routed_experts",
    declare_kv: Annotated[
        str | None, typer.Option("--declare-kv", help="nvfp4: vLLM keeps its KV cache in FP4 unless told otherwise.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", help="bf16: the engine leaves the experts' inputs unrounded (W4A16).")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything back and compare it with what the trainer computes.")] = False,
    task: Annotated[
        str | None, typer.Option("--task", help="Task whose prompts calibrate a checkpoint that never was; the run's own by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Write FP4 or BF16 weights that vLLM loads."""
    from rollout_bridge.export import ExportSettings, export_checkpoint
    from rollout_bridge.export.run import print_export

    settings = ExportSettings(format, scope, declare_kv, activations)
    run_and_show(
        lambda display: export_checkpoint(
            policy, out, settings, verify=verify, task=task, overrides=overrides or [], announce=display.announce
        ),
        print_export,
        json=json,
    )
