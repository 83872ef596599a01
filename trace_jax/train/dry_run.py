"""`trace-jax train --dry-run`: the resolved configuration and where the memory of a run goes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax.config import Config, dump, resolve_layers
from trace_jax.guidance.site_record import row_bytes
from trace_jax.models.registry import key_map, param_shapes
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.weight_sync import expected_tensors
from trace_jax.sharding.rules import device_values
from trace_jax.train.setup import Setup, build_setup, initial_policy, training_mesh
from trace_jax.train.sft import worked_example


def plan_run(config: Config) -> dict[str, Any]:
    """Checks everything that the start of `train` checks: policy, tokenizer, layers, splits, lengths, the rows that calibrate.

    Returns:
      The resolved `config`, and the `memory` plan.
    """
    if config.model.source is None:
        setup, multipliers = build_setup(config), {}  # the memory plan needs no random parameters
    else:
        setup, _, multipliers = initial_policy(config)
    try:
        mesh = training_mesh(config, setup.policy.family, setup.policy.config)
        setup.require_launch()
        fraction = config.rollout.residual_compensation.fraction
        _require_rows(setup, calibrates=not multipliers or 0 < fraction < 1)
        memory = memory_plan(setup) | device_plan(setup, {} if mesh is None else mesh.shape)
        return {"config": config.model_dump(mode="json"), "memory": memory}
    finally:
        setup.task.close()


def _require_rows(setup: Setup, *, calibrates: bool) -> None:
    """The questions of a run are there, and the tokenizer takes the worked answers if multipliers or channels come from them."""
    setup.require_rows()
    if calibrates:
        for row in setup.task.prompts("train", 0, setup.config.calibration.prompts):
            worked_example(row, setup.tokenizer)


def print_plan(config: Config, memory: Mapping[str, float]) -> None:
    """Prints the config as YAML, and the memory plan as its comments."""
    print(dump(config))
    for name, value in memory.items():
        print(f"# {name:<44} {memory_text(name, value)}")


def memory_text(name: str, value: float) -> str:
    """An entry of the memory plan: MiB where its name says bytes."""
    return f"{value / 2**20:10.2f} MiB" if name.endswith("bytes") else f"{value:10g}"


def memory_plan(setup: Setup) -> dict[str, Any]:
    """Arithmetic, not a measurement: bytes of the trainer, the engine and the record of one step.

    Returns:
      Byte counts by name, and counts of parameters, sequences and tokens.
    """
    config, model = setup.config, setup.policy.config
    count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(setup.policy.family, model)))
    sequences = config.rollout.group_size * config.rollout.prompts_per_step
    length, audit = setup.max_sequence_tokens(), config.guidance.audit
    audited = min(audit.sequences, sequences) if audit.every else 0
    codes = CaptureSpec("codes", RECORDED_SITES, tuple(range(model.num_layers)))
    ahead = batches_ahead(config)
    return {
        "parameters": count,
        "sequences per step": sequences,
        "longest sequence, tokens": length,
        "masters and Adam moments (float32), bytes": 3 * 4 * count,
        "gradient and its sum (float32), bytes": 2 * 4 * count,
        "new masters and moments beside the old in an update (float32), bytes": 3 * 4 * count,
        "experts as the trainer rounds them (compute dtype), bytes": rounded_experts_bytes(setup),
        "masters that the engine serves (float32), bytes": 4 * count if config.sync.every > 1 else 0,
        "new weights that wait for the engine, bytes": update_bytes(setup) if ahead else 0,
        "engine weights (compute dtype), bytes": jnp.dtype(setup.policy.compute_dtype).itemsize * (count + compensating_columns(setup)),
        "KV cache of a full batch, bytes": cache_bytes(setup, min(sequences, config.rollout.max_batch or sequences), length),
        "guidance record per token": record_bytes_per_token(setup, setup.capture()),
        "guidance record of a step, bytes": sequences * length * record_bytes_per_token(setup, setup.capture()),
        "guidance record of batches ahead, bytes": ahead * sequences * length * record_bytes_per_token(setup, setup.capture()),
        "audited codes of a step, bytes": audited * length * record_bytes_per_token(setup, codes),
    }


def device_plan(setup: Setup, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What each device of the training mesh holds of the state; nothing for a run on one device, where it is the total.

    Rounded experts lie where the experts do. Activations are not counted, and neither is the embedded engine, which is whole on the first
    device of each process.

    Args:
      sizes: of the mesh, by axis.
    """
    if not sizes:
        return {}
    shapes = param_shapes(setup.policy.family, setup.policy.config)
    count, experts = device_values(shapes, sizes), device_values(_experts_of(shapes), sizes)
    served = 4 * count if setup.config.sync.every > 1 else 0
    rounded = 0 if setup.objective.plan.weights == "bf16" else jnp.dtype(setup.policy.compute_dtype).itemsize * experts
    parts = {
        "masters and Adam moments (float32), bytes": 3 * 4 * count,
        "gradient and its sum (float32), bytes": 2 * 4 * count,
        "new masters and moments beside the old in an update (float32), bytes": 3 * 4 * count,
        "experts as the trainer rounds them (compute dtype), bytes": rounded,
        "masters that the engine serves (float32), bytes": served,
    }
    parts["all of these, bytes"] = sum(parts.values())
    return {"devices of the mesh": math.prod(sizes.values())} | {f"each device: {name}": value for name, value in parts.items()}


def _experts_of(shapes: Any) -> Any:
    """The weights of the routed experts, None in place of everything else."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if "['experts']" in jax.tree_util.keystr(path) else None, shapes)


def batches_ahead(config: Config) -> int:
    """Batches that an asynchronous run has beside the one that it trains on, at most: those of its last update."""
    return config.sync.max_staleness // config.train.updates_per_batch if config.asynchronous else 0


def update_bytes(setup: Setup) -> int:
    """Bytes of the tensors that an engine gets: codes, scales, and what is not quantized."""
    tensors = expected_tensors(setup.policy, setup.rollout_plan).values()
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for dtype, shape in tensors)


def rounded_experts_bytes(setup: Setup) -> int:
    """Bytes of the rounded experts that all micro-batches of an update share; none if the trainer's plan rounds no weight."""
    if setup.objective.plan.weights == "bf16":
        return 0
    entries = key_map(setup.policy.family, setup.policy.config)
    return jnp.dtype(setup.policy.compute_dtype).itemsize * sum(math.prod(entry.shape) for entry in entries if entry.is_expert)


def compensating_columns(setup: Setup) -> int:
    """Weights that the embedded engine holds twice, because residual compensation multiplies them again."""
    model, counts = setup.policy.config, setup.channel_counts()
    rows = {"expert_input": 2 * model.expert_hidden_size, "down_input": model.hidden_size}
    return len(model.moe_layer_ids) * model.num_experts * sum(rows[site] * count for site, count in counts.items())


def cache_bytes(setup: Setup, rows: int, slots: int) -> int:
    """Bytes of the embedded engine's KV cache, from the shapes that it allocates."""
    allocate = functools.partial(setup.policy.empty_cache, rows, slots, setup.rollout_plan)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(allocate)))


def record_bytes_per_token(setup: Setup, capture: CaptureSpec) -> float:
    """Data and scale bytes of a record, by the formulas of docs/method.md."""
    if capture.kind == "none":
        return 0.0
    model, total = setup.policy.config, 0.0
    layers = resolve_layers(list(capture.layers), model.num_layers)
    for name in capture.sites:
        fmt = setup.rollout_plan.site(name).format
        if fmt not in BLOCK_FORMATS or not model.layers_of(name):
            continue  # nothing to record
        site = model.sites[name]
        recorded, vectors, width = len(set(layers) & set(site.layer_ids)), math.prod(site.lead), site.width
        total += recorded * vectors * row_bytes(capture.kind, fmt, width)
    return total
