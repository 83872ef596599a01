"""Quantization in jnp, safe under jit on every backend."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.arithmetic import bits_float, encode_block, float_bits, magnitude_bits
from pallas_kernels.blocks import join_blocks, per_block, split_blocks
from pallas_kernels.formats import BlockFormat
from pallas_kernels.ladder import nearest_index
from pallas_kernels.packing import pack_codes


@functools.partial(jax.jit, static_argnames="fmt")
def quantize(
    x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows blocks"]]:
    """Packed codes and scale bytes of x under an aligned multiplier (`resolve_multiplier`)."""
    blocks = split_blocks(x, fmt)
    magnitudes = magnitude_bits(blocks)
    amax = jnp.max(magnitudes, axis=-1, keepdims=True)
    scales, gain, step = encode_block(amax, None if multiplier is None else per_block(multiplier))
    index = nearest_index(bits_float(magnitudes) * gain, step, fmt)
    # Code 8 would be -0: the sign goes only onto a code above zero.
    codes = jnp.where((index > 0) & (float_bits(blocks) < 0), index + 8, index)
    # Without the barrier XLA on CPU computes every code again for each byte that it goes into.
    codes = jax.lax.optimization_barrier(join_blocks(codes.astype(jnp.uint8), x.shape[-1]))
    return pack_codes(codes), scales[..., 0].astype(jnp.uint8)
