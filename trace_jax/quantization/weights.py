"""The one quantizer of expert weights: trainer, exporter and weight sync all call it.

Its input is always `bfloat16(master)`, amax included, so the FP4 of a BF16 export equals the FP4 of the master.
Gate and up of one expert share a multiplier, because engines fuse the two and read only one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels import Quantized, block_format, decode_multiplier, fake_quant, fake_quant_fp8, quantize, round_to_bf16
from pallas_kernels.four_over_six import fake_quant_four_over_six, quantize_four_over_six, room
from trace_jax.layers.experts import ExpertWeights
from trace_jax.quantization.plan import WeightFormat, block_format_name
from trace_jax.sharding.axes import per_shard
from trace_jax.sharding.rules import EXPERT_COLUMNS, EXPERT_ROWS, constrain_params


def expert_multipliers(weights: ExpertWeights, fmt: WeightFormat = "nvfp4") -> tuple[Float[Array, "*L E"], Float[Array, "*L E"]]:
    """Decode multipliers per expert: one shared by gate and up, one for down; finite and positive also for a dead expert."""

    def amax(w: Float[Array, "*L E out in"]) -> Float[Array, "*L E"]:
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(w)), axis=(-2, -1))
        return room(largest) if fmt == "nvfp4_4over6" else largest

    return decode_multiplier(jnp.maximum(amax(weights.gate), amax(weights.up))), decode_multiplier(amax(weights.down))


def fake_quant_experts(masters: ExpertWeights, fmt: WeightFormat) -> ExpertWeights:
    """Expert weights as the rollout engine decodes them, with straight-through gradients to the float32 masters.

    Args:
      masters: float32 weights of one layer (or with leading axes).
      fmt: `bf16` returns the masters (the caller casts them); block formats round along the contraction axis.

    Returns:
      float32 arrays; their values are exact in BF16 unless `fmt` is `bf16`.
    """
    if fmt == "bf16":
        return masters
    rounded = ExpertWeights(*(round_to_bf16(w) for w in masters))
    if fmt == "fp8":
        return ExpertWeights(*_per_shard(fake_quant_fp8, rounded))
    if fmt == "nvfp4_4over6":
        return ExpertWeights(*_per_shard(fake_quant_four_over_six, rounded, expert_multipliers(rounded, fmt)))
    block = block_format(fmt)
    if not block.has_multiplier:
        return ExpertWeights(*_per_shard(lambda w: fake_quant(w, block), rounded))
    return ExpertWeights(*_per_shard(lambda w, rows: fake_quant(w, block, rows), rounded, expert_multipliers(rounded)))


@functools.partial(jax.jit, static_argnames=("fmt", "dtype"))
def with_rounded_experts(params: dict[str, Any], *, fmt: WeightFormat, dtype: str) -> dict[str, Any]:
    """Parameters whose experts are `fake_quant_experts` of the masters, in the compute dtype, which holds them exactly.

    A forward that takes them rounds no weight, so several micro-batches share one rounding; the gradient with respect to them is the
    straight-through one with respect to the masters.
    """

    def rounded(tree: dict[Any, Any]) -> dict[Any, Any]:
        if "experts" in tree:
            experts = fake_quant_experts(ExpertWeights(**tree["experts"]), fmt)
            return tree | {"experts": {name: w.astype(dtype) for name, w in zip(ExpertWeights._fields, experts, strict=True)}}
        return {key: rounded(value) if isinstance(value, dict) else value for key, value in tree.items()}

    return constrain_params(params | {"groups": rounded(params["groups"])})


def quantize_experts(masters: ExpertWeights, fmt: WeightFormat) -> dict[str, Quantized]:
    """Codes, block scales and multipliers of the experts in a block format; keys `gate`, `up`, `down`.

    `dequantize` of the result equals `fake_quant_experts` bit for bit.
    """
    rounded = ExpertWeights(*(round_to_bf16(w) for w in masters))
    name = block_format_name(fmt)
    assert name is not None  # the caller has a format with codes
    block = block_format(name)

    def parts(w: Float[Array, "*E out in"], *rows: Float[Array, "*E out"]) -> tuple[Array, ...]:
        if fmt == "nvfp4_4over6":
            return *quantize_four_over_six(w, *rows), *rows
        quantized = quantize(w, block, *rows)
        return quantized.codes, quantized.scales, *rows

    found = _per_shard(parts, rounded, expert_multipliers(rounded, fmt) if block.has_multiplier else None)
    return {
        name: Quantized(codes, scales, rows[0] if rows else None, size=w.shape[-1], fmt=block)
        for name, (codes, scales, *rows), w in zip(ExpertWeights._fields, found, rounded, strict=True)
    }


def _per_shard(function: Callable[..., Any], weights: ExpertWeights, multipliers: tuple[Array, Array] | None = None) -> list[Any]:
    """`function(weight)`, or `function(weight, multipliers of its rows)`, of each weight; on a mesh, of the share that each device has.

    Args:
      multipliers: per expert, one for gate and up and one for down.
    """
    results = []
    for index, weight in enumerate(weights):
        axes = (None,) * (weight.ndim - 3) + (EXPERT_COLUMNS if index == 2 else EXPERT_ROWS)
        arguments = [weight]
        if multipliers is not None:
            arguments.append(jnp.broadcast_to(multipliers[index == 2][..., None], weight.shape[:-1]))
        specs = tuple(PartitionSpec(*axes[: argument.ndim]) for argument in arguments)
        shapes = jax.eval_shape(function, *arguments)
        outputs = jax.tree.map(lambda leaf, axes=axes: PartitionSpec(*axes[: leaf.ndim]), shapes)
        results.append(per_shard(function, specs, outputs)(*arguments))
    return results
