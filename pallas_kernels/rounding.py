"""Roundings that a compiler cannot drop, and counting what cannot be rounded."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import INFINITY_BITS, float_bits, nearest_bf16

_round = jax.custom_vjp(nearest_bf16)
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


def as_stored(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x widened to float32, holding what an array of its own dtype holds.

    Inside a jitted graph XLA drops the rounding between a producer and a widening (`xla_allow_excess_precision`, on by default,
    CPU and GPU). A quantizer would then see values, and give codes, that no engine which stores its activations has, and they
    would change with whatever is fused around it. `reduce_precision` is never dropped.

    Args:
      x: bfloat16, float16 or float32. Float32 comes back as it is.
    """
    wide = x.astype(jnp.float32)
    if x.dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    if x.dtype == jnp.float16:
        # `reduce_precision` flushes subnormals; below 2^-14 the step of float16 is that of float32 at one half.
        small = jnp.copysign((jnp.abs(wide) + 0.5) - 0.5, wide)
        return jnp.where(jnp.abs(wide) < 2.0**-14, small, jax.lax.reduce_precision(wide, exponent_bits=5, mantissa_bits=10))
    return wide


def keep_rounding(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x itself, its rounding out of the compiler's reach (`as_stored`).

    For values that go into a matrix product: XLA on CPU computes a bfloat16 product in float32 and, depending on what it
    fuses, takes operands that were never rounded, so that one layer gives different numbers in prefill, decode and training.
    """
    return as_stored(x).astype(x.dtype)


def count_nonfinite(x: Float[Array, "*s"]) -> Int[Array, ""]:
    """How many values of x are NaN or infinite, int32. Quantizers turn their blocks into NaN; this says it early."""
    bits = float_bits(x.astype(jnp.float32)) & 0x7FFFFFFF
    return jnp.sum(jnp.where(bits >= INFINITY_BITS, 1, 0), dtype=jnp.int32)
