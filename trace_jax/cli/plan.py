"""`trace-jax plan`: what a model needs on which GPUs, by arithmetic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display
from trace_jax.errors import UserError


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Qwen3-30B-A3B or another known name, a Hugging Face folder or config.json, a run.")
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="H100, H200, B200 or GB200.")] = "H200",
    format: Annotated[str, typer.Option("--format", help="Of the rollout: nvfp4 or mxfp4.")] = "nvfp4",
    train_gpus: Annotated[int, typer.Option("--train-gpus", min=1, help="GPUs that train.")] = 8,
    engine_gpus: Annotated[int, typer.Option("--engine-gpus", min=1, help="GPUs that serve one rollout engine.")] = 1,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Answers of a step.")] = 4096,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each, prompt included.")] = 32_768,
    layers: Annotated[str, typer.Option("--layers", help="Recorded layers, as in guidance.layers.")] = "last_half",
    record: Annotated[str, typer.Option("--record", help="What is recorded of a value: scales, mantissa or codes.")] = "mantissa",
    json: Json = False,
) -> None:
    """Say what a model needs on which GPUs: memory, record, transfer, decode speed, meshes. A model, not a measurement."""
    from trace_jax.guidance.site_record import RECORD_KINDS
    from trace_jax.planning.gpus import gpu_of
    from trace_jax.planning.models import policy_of
    from trace_jax.planning.report import make_plan, print_plan
    from trace_jax.quantization.plan import BLOCK_FORMATS

    def work(display: Display) -> dict[str, Any]:
        for option, value, known in (("--format", format, BLOCK_FORMATS), ("--record", record, RECORD_KINDS)):
            if value not in known:
                raise UserError(f"{option} {value} is unknown; write one of: {', '.join(known)}")
        return make_plan(
            policy_of(model),
            gpu_of(gpu),
            fmt=format,
            train_gpus=train_gpus,
            engine_gpus=engine_gpus,
            sequences=sequences,
            tokens=tokens,
            layers=layers,
            record=record,
        )

    run_and_show(work, lambda found: print_plan(found, model), json=json)
