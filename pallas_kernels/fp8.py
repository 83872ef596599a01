"""Fake quantization to E4M3 (FP8) with a power-of-two scale per block."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import INFINITY_BITS, SMALLEST_NORMAL, bits_float, e4m3_code, e4m3_value, float_bits, magnitude_bits
from pallas_kernels.blocks import check_input, join_blocks, pad_last
from pallas_kernels.rounding import as_stored

_SIGN_BIT = -0x80000000


def fake_quant_fp8(x: Float[Array, "*rows d"], *, block: int | None = 128) -> Float[Array, "*rows d"]:
    """x rounded to E4M3 values under one scale per block of its last axis, with a straight-through gradient.

    The scale is the smallest power of two s with amax(block) <= 448 s (2^-126 at least), so scaling is exact and the only
    rounding is that to E4M3, ties to even; the results are exact in bfloat16. Engines that use amax / 448 itself as the
    scale round differently; this is the mode of power-of-two (UE8M0) FP8 recipes.

    Args:
      x: bfloat16, float16 or float32.
      block: values that share a scale; None takes the whole last axis. A last block may be shorter.

    Returns:
      Array of the shape and dtype of x. A block with a value that is not finite becomes NaN; results below 2^-126 are zero.

    Raises:
      ValueError: wrong dtype, empty last axis or a block that is not positive.
    """
    check_input(x)
    if block is not None and block < 1:
        raise ValueError(f"block is {block}; write a positive number of values or None")
    return _fake_quant_fp8(x, x.shape[-1] if block is None else min(block, x.shape[-1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def _fake_quant_fp8(x, block):
    size = x.shape[-1]
    count = -(-size // block)
    blocks = pad_last(as_stored(x), count * block).reshape((*x.shape[:-1], count, block))
    magnitudes = magnitude_bits(blocks)
    amax = jnp.max(magnitudes, axis=-1, keepdims=True)
    # 448 = 1.75 * 2^8: one more exponent step if the mantissa of amax lies above that of 1.75.
    exponent = (amax >> 23) - 8 + jnp.where((amax & 0x7FFFFF) > 0x600000, 1, 0)
    exponent = jnp.clip(exponent, 1, 253)
    gain, scale = bits_float((254 - exponent) << 23), bits_float(exponent << 23)
    scale = jnp.where(amax >= INFINITY_BITS, jnp.nan, scale)
    # A block that is not finite is NaN by its scale; the limit only keeps its codes within range.
    value = e4m3_value(e4m3_code(jnp.minimum(bits_float(magnitudes) * gain, 448.0))) * scale
    bits = float_bits(jnp.where(value < SMALLEST_NORMAL, 0.0, value))
    out = bits_float(jnp.where(bits == 0, 0, bits | (float_bits(blocks) & _SIGN_BIT)))
    return join_blocks(out, size).astype(x.dtype)


_fake_quant_fp8.defvjp(lambda x, block: (_fake_quant_fp8(x, block), None), lambda block, _, cotangent: (cotangent,))
