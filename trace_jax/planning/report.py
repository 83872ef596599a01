"""Everything that `trace-jax plan` says, as plain values and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from trace_jax.config import resolve_layers
from trace_jax.models.policy import Policy
from trace_jax.planning import footprint
from trace_jax.planning.gpus import Gpu
from trace_jax.planning.meshes import fitting_meshes
from trace_jax.planning.roofline import RESERVE, batch_that_fits, rollouts, speedups, step_seconds
from trace_jax.terminal import result_console

NOTE = "A model by arithmetic from data sheets, not a measurement: nothing here was run."

PUBLISHED_SPEEDUP, PUBLISHED_CONTEXT = 5.4, 131_072
"""Decode throughput of TRACE's NVFP4 rollout over BF16 at that output length (arXiv 2610.07767, figure 9)."""

BATCHES = (1, 8, 32, 128, 512)
CONTEXTS = (1024, 8192, 32_768, PUBLISHED_CONTEXT)
HOST_COPY = 20e9
"""Bytes per second of one core that copies into shared memory; the quiet machine of docs/performance.md reached that."""


def make_plan(
    policy: Policy, gpu: Gpu, *, fmt: str, train_gpus: int, engine_gpus: int, sequences: int, tokens: int, layers: str, record: str
) -> dict[str, Any]:
    """All figures.

    Args:
      fmt: `nvfp4` or `mxfp4`, of the rollout.
      train_gpus, engine_gpus: how many GPUs train, and how many serve one engine.
      sequences, tokens: of a step, tokens for each sequence.
      layers: recorded layers, as in `guidance.layers`.
      record: `scales`, `mantissa` or `codes`.

    Raises:
      UserError: the layers are not those of the model.
    """
    config = policy.config
    counts = footprint.parameters_of(policy)
    every, kept = tuple(range(config.num_layers)), resolve_layers(layers, config.num_layers)
    sizes = footprint.record_bytes(policy, fmt, record, kept)  # pyright: ignore[reportArgumentType]
    step = sizes["total"] * sequences * tokens
    modes = rollouts(gpu, fmt)
    training = footprint.training_bytes(counts, fmt)
    room = gpu.memory * (1 - RESERVE)
    return {
        "note": NOTE,
        "gpu": {"name": gpu.name, "source": gpu.source, "memory": gpu.memory, "bandwidth": gpu.bandwidth},
        "parameters": {"total": counts.total, "routed_experts": counts.experts, "active": counts.active},
        "training_bytes": training | {"total": sum(training.values())},
        "engine_bytes": {
            name: {
                "weights": footprint.weight_bytes(counts, mode.weights),
                "cache_per_token": footprint.cache_bytes_per_token(policy, mode.cache),
                "sequences_that_fit": {
                    context: batch_that_fits(policy, gpu, mode, context, engine_gpus) for context in _contexts(config.max_position)
                },
            }
            for name, mode in modes.items()
        },
        "record_bytes_per_token": sizes,
        "record_bytes_per_token_full": footprint.record_bytes(policy, fmt, "codes", every),
        "record_bytes_per_step": step,
        "transfer_seconds": {"host link": step / gpu.host, "NVLink": step / gpu.nvlink, "shared memory, one core": step / HOST_COPY},
        "decode_speedup": speedups(policy, gpu, fmt, BATCHES, _contexts(config.max_position), engine_gpus),
        "decode_tokens_per_s": {
            name: {
                context: {batch: batch / step_seconds(policy, gpu, mode, batch, context, engine_gpus) for batch in BATCHES}
                for context in _contexts(config.max_position)
            }
            for name, mode in modes.items()
        },
        "products": modes[fmt].products,
        "published": {"speedup": PUBLISHED_SPEEDUP, "context": PUBLISHED_CONTEXT},
        "meshes": [{"mesh": fit.sizes, "bytes_per_gpu": fit.device_bytes} for fit in fitting_meshes(policy, train_gpus, room, fmt)],
        "train_gpus": train_gpus,
        "engine_gpus": engine_gpus,
    }


def print_plan(plan: Mapping[str, Any], title: str) -> None:
    """Prints the figures for a person."""
    console, parameters = result_console(), plan["parameters"]
    console.print(f"[bold]{title}[/bold] on {plan['gpu']['name']} ({plan['gpu']['source']}). {plan['note']}")
    console.print(
        f"{parameters['total'] / 1e9:.2f} G parameters, {parameters['routed_experts'] / 1e9:.2f} G of them in routed experts, "
        f"{parameters['active'] / 1e9:.2f} G for a token"
    )
    memory = _table("memory", "part", "GB")
    for name, size in plan["training_bytes"].items():
        memory.add_row(f"training, {name}", _gb(size))
    for name, engine in plan["engine_bytes"].items():
        fits = ", ".join(f"{count} of {_tokens(context)}" for context, count in engine["sequences_that_fit"].items())
        memory.add_row(f"engine in {name}, weights", _gb(engine["weights"]))
        memory.add_row(
            f"engine in {name}, cache of 1000 tokens; sequences beside the weights: {fits}", _gb(1000 * engine["cache_per_token"])
        )
    console.print(memory)

    record = _table("guidance record, bytes per token", *plan["record_bytes_per_token"])
    record.add_row(*map(str, plan["record_bytes_per_token"].values()))
    record.add_row(*map(str, plan["record_bytes_per_token_full"].values()))
    console.print(record, "(second row: whole codes of all layers)")
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in plan["transfer_seconds"].items())
    console.print(f"a step: {_gb(plan['record_bytes_per_step'])} GB of record; over one {seconds}")

    speed = _table("decode throughput over BF16, upper bound", "context", *(f"batch {batch}" for batch in BATCHES), "full memory")
    for context, row in plan["decode_speedup"].items():
        speed.add_row(_tokens(context), *("-" if value is None else f"{value:.2f}" for value in row.values()))
    console.print(speed)
    console.print(published_line(plan))
    meshes = plan["meshes"]
    if not meshes:
        console.print(f"no mesh of {plan['train_gpus']} GPUs divides the model and has room for it; take more with --train-gpus")
    for fit in meshes[:5]:
        shown = ", ".join(f"{axis}: {size}" for axis, size in fit["mesh"].items())
        console.print(f"mesh: {{{shown}}}  {_gb(fit['bytes_per_gpu'])} GB a GPU without activations", highlight=False)


def published_line(plan: Mapping[str, Any]) -> str:
    """Where the published speed-up lies on this curve."""
    rows, published = plan["decode_speedup"], plan["published"]
    equal = max((value for row in rows.values() for batch, value in row.items() if batch != "full" and value is not None), default=None)
    full = {context: row["full"] for context, row in rows.items() if row["full"] is not None}
    if equal is None or not full:
        return (
            f"the published {published['speedup']}x cannot be placed: the model does not fit {plan['engine_gpus']} GPU; take more with "
            "--engine-gpus"
        )
    best = max(full, key=lambda context: full[context])
    reached = equal >= published["speedup"] or full[best] >= published["speedup"]
    verdict = "lies on this curve" if reached else "lies above this curve"
    at = full.get(published["context"])
    there = "" if at is None else f"; {at:.2f} at {_tokens(published['context'])}"
    return (
        f"the published {published['speedup']}x (decode, {_tokens(published['context'])} of output) {verdict}: with equal batches at most "
        f"{equal:.2f}, with the memory of each full at most {full[best]:.2f} ({_tokens(best)}{there})"
    )


def _contexts(longest: int) -> Sequence[int]:
    return [context for context in CONTEXTS if context <= longest] or [longest]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:,.0f}"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)
