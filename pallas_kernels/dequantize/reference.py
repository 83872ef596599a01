"""Dequantization in jnp."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.arithmetic import decode_terms, e2m1_magnitude, signed_value
from pallas_kernels.blocks import join_blocks, pad_last, per_block
from pallas_kernels.formats import BlockFormat
from pallas_kernels.packing import interleave_nibbles


@functools.partial(jax.jit, static_argnames=("size", "fmt", "dtype"))
def dequantize(
    codes: UInt8[Array, "*rows bytes"],
    scales: UInt8[Array, "*rows blocks"],
    multiplier: Float[Array, "*#rows"] | None,
    size: int,
    fmt: BlockFormat,
    dtype: DTypeLike,
) -> Float[Array, "*rows d"]:
    """The values, each exact in bfloat16, in `dtype`."""
    count = scales.shape[-1]
    nibbles = interleave_nibbles(pad_last(codes, count * fmt.block // 2)).reshape((*scales.shape, fmt.block))
    multiplier = None if multiplier is None else per_block(multiplier)
    factor, pre = decode_terms(scales[..., None].astype(jnp.int32), multiplier)
    return join_blocks(signed_value(e2m1_magnitude(nibbles & 7), nibbles << 28, factor, pre), size).astype(dtype)
