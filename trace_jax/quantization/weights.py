"""The one quantizer of expert weights: trainer, exporter and weight sync all call it.

Its input is always `bfloat16(master)`, amax included, so the FP4 of a BF16 export equals the FP4 of the master.
Gate and up of one expert share a multiplier, because engines fuse the two and read only one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Quantized, block_format, decode_multiplier, fake_quant, fake_quant_fp8, quantize, round_to_bf16
from trace_jax.layers.experts import ExpertWeights
from trace_jax.quantization.plan import Format


def expert_multipliers(weights: ExpertWeights) -> tuple[Float[Array, "*L E"], Float[Array, "*L E"]]:
    """Decode multipliers per expert: one shared by gate and up, one for down; finite and positive also for a dead expert."""

    def amax(w: Float[Array, "*L E out in"]) -> Float[Array, "*L E"]:
        return jnp.max(jnp.abs(jax.lax.stop_gradient(w)), axis=(-2, -1))

    return decode_multiplier(jnp.maximum(amax(weights.gate), amax(weights.up))), decode_multiplier(amax(weights.down))


def fake_quant_experts(masters: ExpertWeights, fmt: Format) -> ExpertWeights:
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
        return ExpertWeights(*(fake_quant_fp8(w) for w in rounded))
    block = block_format(fmt)
    if not block.has_multiplier:
        return ExpertWeights(*(fake_quant(w, block) for w in rounded))
    gate_up, down = expert_multipliers(rounded)
    return ExpertWeights(
        fake_quant(rounded.gate, block, _rows(gate_up, rounded.gate)),
        fake_quant(rounded.up, block, _rows(gate_up, rounded.up)),
        fake_quant(rounded.down, block, _rows(down, rounded.down)),
    )


@functools.partial(jax.jit, static_argnames=("fmt", "dtype"))
def with_rounded_experts(params: dict[str, Any], *, fmt: Format, dtype: str) -> dict[str, Any]:
    """Parameters whose experts are `fake_quant_experts` of the masters, in the compute dtype, which holds them exactly.

    A forward that takes them rounds no weight, so several micro-batches share one rounding; the gradient with respect to them is the
    straight-through one with respect to the masters.
    """

    def rounded(tree: dict[Any, Any]) -> dict[Any, Any]:
        if "experts" in tree:
            experts = fake_quant_experts(ExpertWeights(**tree["experts"]), fmt)
            return tree | {"experts": {name: w.astype(dtype) for name, w in zip(ExpertWeights._fields, experts, strict=True)}}
        return {key: rounded(value) if isinstance(value, dict) else value for key, value in tree.items()}

    return params | {"groups": rounded(params["groups"])}


def quantize_experts(masters: ExpertWeights, fmt: Format) -> dict[str, Quantized]:
    """Codes, block scales and multipliers of the experts in a block format; keys `gate`, `up`, `down`.

    `dequantize` of the result equals `fake_quant_experts` bit for bit.
    """
    rounded = ExpertWeights(*(round_to_bf16(w) for w in masters))
    block = block_format(fmt)
    gate_up, down = expert_multipliers(rounded)
    multipliers = {"gate": gate_up, "up": gate_up, "down": down}
    return {
        name: quantize(w, block, _rows(multipliers[name], w) if block.has_multiplier else None)
        for name, w in zip(ExpertWeights._fields, rounded, strict=True)
    }


def _rows(per_expert: Float[Array, "*E"], weight: Float[Array, "*E out in"]) -> Float[Array, "*E out"]:
    return jnp.broadcast_to(per_expert[..., None], weight.shape[:-1])
