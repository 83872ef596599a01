"""Rounding float32 values to bfloat16 without leaving float32, and counting what cannot be rounded."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import INFINITY_BITS, bits_float, float_bits, round_bits_to_bf16


@jax.custom_vjp
def _round(x):
    bits = float_bits(x)
    # The carry of a NaN's low bits could reach the sign, so NaN gets its quiet bit and loses the rest first.
    is_nan = (bits & 0x7FFFFFFF) > INFINITY_BITS
    return bits_float(jnp.where(is_nan, (bits | 0x400000) & -0x10000, round_bits_to_bf16(bits)))


_round.defvjp(lambda x: (_round(x), None), lambda _, cotangent: (cotangent,))


def round_to_bf16(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x rounded to the nearest bfloat16 value (ties to even), as float32, with a straight-through gradient.

    The weight quantizer sees `round_to_bf16(master)`. Integer arithmetic: `x.astype(bfloat16).astype(float32)` is a cast
    pair that XLA may drop on a GPU. Subnormals are rounded, infinities kept, NaN stays NaN.

    Raises ValueError if x is not float32.
    """
    if x.dtype != jnp.float32:
        raise ValueError(f"round_to_bf16 takes float32, got {x.dtype}; cast first")
    return _round(x)


def count_nonfinite(x: Float[Array, "*s"]) -> Int[Array, ""]:
    """How many values of x are NaN or infinite, int32. Quantizers turn their blocks into NaN; this says it early."""
    bits = float_bits(x.astype(jnp.float32)) & 0x7FFFFFFF
    return jnp.sum(jnp.where(bits >= INFINITY_BITS, 1, 0), dtype=jnp.int32)
