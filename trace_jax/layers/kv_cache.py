"""A key/value cache that stores what the attention reads: BF16 values, or packed FP4 codes and block scales.

Slot `s` of a sequence holds the key and value of position `s`. A slot is written before it is read, the newest one
included, so decode attends over the same rounded values as a teacher-forced forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels import Quantized, block_format, dequantize
from pallas_kernels.pytrees import register_arrays
from trace_jax.quantization.plan import BLOCK_FORMATS, QuantPlan
from trace_jax.quantization.sites import Captured


@register_arrays
@dataclass(frozen=True)
class CacheSide:
    """Keys or values of all layers.

    Args:
      data: values `[L, B, S, K, head_dim]`, or packed codes (uint8, last axis `head_dim / 2`).
      scales: block-scale bytes `[L, B, S, K, head_dim / block]`; None for plain values.
      multiplier: float32 `[L, B, S]` when each token has its own; None otherwise.
      format: name of the number format of the stored data.
    """

    data: Shaped[Array, "L B S K width"]
    scales: UInt8[Array, "L B S K blocks"] | None
    multiplier: Float[Array, "L B S"] | None
    format: str = field(metadata={"static": True})


@register_arrays
@dataclass(frozen=True)
class RecurrentState:
    """What layers of linear attention keep instead of keys and values; its size does not depend on the length.

    Args:
      state: float32 `[L, B, H, key, value]`.
      inputs: the newest inputs of the convolution `[L, B, taps - 1, channels]`, compute dtype.
    """

    state: Float[Array, "L B H key value"]
    inputs: Float[Array, "L B before channels"]


@register_arrays
@dataclass(frozen=True)
class KVCache:
    """Both sides of the cache, and the state of the layers that have none."""

    k: CacheSide
    v: CacheSide
    recurrent: RecurrentState | None = None

    @property
    def num_slots(self) -> int:
        """S, positions a sequence can hold."""
        return self.k.data.shape[2]


def init_cache(
    layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, plan: QuantPlan, dtype: jnp.dtype, value_dim: int | None = None
) -> KVCache:
    """An empty cache in the formats of the plan; FP8 values are kept in the compute dtype after rounding.

    Args:
      value_dim: width of the values where it is not that of the keys.
    """

    def side(fmt: str, head_dim: int) -> CacheSide:
        shape = (layers, batch, slots, kv_heads)
        if fmt not in BLOCK_FORMATS:
            return CacheSide(jnp.zeros((*shape, head_dim), dtype), None, None, fmt)
        block = block_format(fmt)
        codes = jnp.zeros((*shape, -(-head_dim // 2)), jnp.uint8)
        scales = jnp.zeros((*shape, -(-head_dim // block.block)), jnp.uint8)
        per_token = plan.per_token and block.has_multiplier
        return CacheSide(codes, scales, jnp.ones(shape[:3], jnp.float32) if per_token else None, fmt)

    return KVCache(side(plan.k.format, head_dim), side(plan.v.format, head_dim if value_dim is None else value_dim))


def append(
    side: CacheSide, layer: Int[Array, ""], positions: Int[Array, "B T"], values: Float[Array, "B T K head_dim"], captured: Captured | None
) -> CacheSide:
    """Writes the tokens at `positions`; positions beyond the cache are dropped."""
    rows = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]

    def write(buffer: Shaped[Array, "L B S *width"], update: Shaped[Array, "B T *width"]) -> Shaped[Array, "L B S *width"]:
        return buffer.at[layer, rows, positions].set(update.astype(buffer.dtype), mode="drop")

    if captured is None:
        return replace(side, data=write(side.data, values))
    scales, multiplier = side.scales, side.multiplier
    assert scales is not None  # a captured block format always has scales
    return replace(
        side,
        data=write(side.data, captured.codes),
        scales=write(scales, captured.scales),
        multiplier=None if multiplier is None or captured.multiplier is None else write(multiplier, captured.multiplier),
    )


def read(
    side: CacheSide, layer: Int[Array, ""], head_dim: int, static_multiplier: Float[Array, ""] | None, dtype: jnp.dtype
) -> Float[Array, "B S K head_dim"]:
    """All slots of a layer as the attention sees them."""
    data = side.data[layer]
    if side.scales is None:
        return data.astype(dtype)
    block = block_format(side.format)
    multiplier = None
    if block.has_multiplier:
        multiplier = static_multiplier if side.multiplier is None else jnp.broadcast_to(side.multiplier[layer][..., None], data.shape[:-1])
    return dequantize(Quantized(codes=data, scales=side.scales[layer], multiplier=multiplier, size=head_dim, fmt=block), dtype)
