"""`trace-jax train --dry-run`: the resolved configuration and where the memory of a run goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from trace_jax.config import Config, dump, resolve_layers
from trace_jax.models.registry import param_shapes
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.train.setup import Setup, build_setup, initial_policy
from trace_jax.train.sft import worked_example

BITS = {"bf16": 16.0, "fp8": 16.0, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits per cached value. The embedded engine keeps FP8 values in the compute dtype."""


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
        _require_rows(setup, calibrates=not multipliers)
        return {"config": config.model_dump(mode="json"), "memory": memory_plan(setup)}
    finally:
        setup.task.close()


def _require_rows(setup: Setup, *, calibrates: bool) -> None:
    """The questions of a run are there, and the tokenizer takes the worked answers if they calibrate the multipliers."""
    for split in ("train", setup.config.eval.split):
        setup.task.rows(split)
    if calibrates:
        for row in setup.task.prompts("train", 0, setup.config.calibration.prompts):
            worked_example(row, setup.tokenizer)


def print_plan(config: Config, memory: Mapping[str, float]) -> None:
    """Prints the config as YAML, and the memory plan as its comments."""
    print(dump(config))
    for name, value in memory.items():
        print(f"# {name:<44} {value / 2**20:10.2f} MiB" if name.endswith("bytes") else f"# {name:<44} {value:10g}")


def memory_plan(setup: Setup) -> dict[str, Any]:
    """Arithmetic, not a measurement: bytes of the trainer, the engine and the record of one step.

    Returns:
      Byte counts by name, and counts of parameters, sequences and tokens.
    """
    config, model = setup.config, setup.policy.config
    count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(setup.policy.family, model)))
    sequences = config.rollout.group_size * config.rollout.prompts_per_step
    length = setup.max_sequence_tokens()
    per_side = model.num_layers * model.num_kv_heads * model.head_dim
    cache_bits = per_side * (BITS[config.rollout.kv_cache.k] + BITS[config.rollout.kv_cache.v])
    return {
        "parameters": count,
        "sequences per step": sequences,
        "longest sequence, tokens": length,
        "masters and Adam moments (float32), bytes": 3 * 4 * count,
        "gradient (float32), bytes": 4 * count,
        "engine weights (compute dtype), bytes": 2 * count,
        "KV cache of a full batch, bytes": sequences * length * cache_bits / 8,
        "guidance record per token": record_bytes_per_token(setup, setup.capture()),
        "guidance record of a step, bytes": sequences * length * record_bytes_per_token(setup, setup.capture()),
    }


def record_bytes_per_token(setup: Setup, capture: CaptureSpec) -> float:
    """Data and scale bytes of a record, by the formulas of docs/method.md."""
    if capture.kind == "none":
        return 0.0
    model, total = setup.policy.config, 0.0
    bits = {"scales": 0, "mantissa": 1, "codes": 4}[capture.kind]
    layers = len(resolve_layers(list(capture.layers), model.num_layers))
    widths = {"expert_input": (1, model.hidden_size), "k": (model.num_kv_heads, model.head_dim), "v": (model.num_kv_heads, model.head_dim)}
    for site in setup.config.recorded_sites:
        vectors, width = widths[site]
        block = 16 if setup.rollout_plan.site(site).format == "nvfp4" else 32
        total += layers * vectors * (-(-width * bits // 8) + -(-width // block))
    return total
