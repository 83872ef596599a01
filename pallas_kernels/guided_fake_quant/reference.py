"""Guided rounding in jnp."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels import ladder
from pallas_kernels.arithmetic import float_bits, magnitude_bits, signed_value
from pallas_kernels.blocks import join_blocks, pad_last, per_block, split_blocks
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant.rule import guided_terms
from pallas_kernels.packing import interleave_nibbles, spread_bits


@functools.partial(jax.jit, static_argnames=("kind", "fmt"))
def guided_fake_quant(
    x: Float[Array, "*rows d"],
    data: UInt8[Array, "*rows bytes"] | None,
    scales: UInt8[Array, "*rows blocks"],
    valid: Bool[Array, "*#rows"],
    multiplier: Float[Array, "*#rows"] | None,
    rollout_multiplier: Float[Array, "*#rows"] | None,
    kind: str,
    fmt: BlockFormat,
) -> Float[Array, "*rows d"]:
    """x rounded under the record; multipliers and `valid` have one axis for every leading axis of x, or none."""
    blocks = split_blocks(x, fmt)
    record = _unpacked(data, blocks.shape, kind)
    scales = scales[..., None].astype(jnp.int32)
    amax = jnp.max(magnitude_bits(blocks), axis=-1, keepdims=True)
    own, rollout = (None if each is None else per_block(each) for each in (multiplier, rollout_multiplier))
    value, factor, pre = guided_terms(blocks, amax, record, scales, per_block(valid), own, rollout, kind, fmt, ladder)
    return join_blocks(signed_value(value, float_bits(blocks), factor, pre), x.shape[-1]).astype(x.dtype)


def _unpacked(data, shape: tuple[int, ...], kind: str):
    """The record as int32, one entry for every value of the padded blocks."""
    if kind == "scales":
        return None
    total = shape[-2] * shape[-1]
    if kind == "mantissa":
        return spread_bits(pad_last(data, total // 8)).reshape(shape)
    return interleave_nibbles(pad_last(data, total // 2)).reshape(shape)
