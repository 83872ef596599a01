"""SwiGLU with a sigmoid that every compiler evaluates to the same bits, shared by the jnp reference and the Pallas body.

An exponential or a quotient of float32 is another number on another device, and on a GPU XLA's may differ from Triton's. So the sigmoid is
defined here, by additions, products and integer operations, each rounded once:

1. |x| log2(e) = n + f, n an integer and |f| <= 1/2. x has eight significant bits (bfloat16) and each of the two parts of log2(e) at most
   sixteen, so their products are exact, fused with an addition or not.
2. E = 2^-f * 2^-n, a polynomial and an exponent. Every product that meets an addition first loses its last bit, which no compiler takes
   for a fused product and sum.
3. 1 / (1 + E) by two steps of Newton's method from a line.
4. Times E where x is negative. Below -86 it is zero.

It is within 2^-18.5 of the sigmoid, relatively: rounded to bfloat16, one SwiGLU in some hundreds is the neighbour of the one that exact
arithmetic gives. Results below 2^-126 count as zero, as everywhere.

Source of SwiGLU: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.arithmetic import bits_float, float_bits, flushed
from pallas_kernels.rounding import as_stored, keep_rounding

LOG2_E = (0xB8AA * 2.0**-15, 0xECA5 * 2.0**-33)
POWER_OF_TWO = (1.0, -0.693147182, 0.240223482, -0.0555038117, 0.00966638792, -0.00133813219)
"""Coefficients of 2^-f for |f| <= 1/2, the constant first."""

LINE = (24 / 17, 8 / 17)
"""24/17 - 8/17 s is off 1/s by at most a seventeenth of it for s in [1, 2]."""

NEWTON = (2 + 1 / 578, 2 + 7 * 2.0**-22)
"""Twos, with half the largest error that they leave added."""

LOWEST = 86.0

_INTEGER = 1.5 * 2.0**23
"""A sum with it rounds to an integer, which its low bits then hold."""


@jax.custom_jvp
def sigmoid(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """1 / (1 + e^-x) of float32 that holds bfloat16 values, as described above. Differentiable, with the derivative s (1 - s)."""
    magnitude = jnp.abs(x)
    # The limit changes no value that counts. Without it XLA would take the sum apart again, and nothing would be rounded.
    shifted = jnp.minimum(magnitude * LOG2_E[0] + _INTEGER, _INTEGER + 128.0)
    fraction = (magnitude * LOG2_E[0] - (shifted - _INTEGER)) + magnitude * LOG2_E[1]
    highest, *others = POWER_OF_TWO[::-1]
    total = jnp.full_like(fraction, highest)
    for coefficient in others:
        total = _separate(total * fraction) + coefficient
    exponential = bits_float(float_bits(total) - (float_bits(shifted) << 23))
    exponential = jnp.where(magnitude > LOWEST, 0.0, exponential)
    divisor = 1.0 + exponential
    inverse = LINE[0] - _separate(LINE[1] * divisor)
    for two in NEWTON:
        inverse = inverse * (two - _separate(inverse * divisor))
    return jnp.where(x < 0.0, inverse * exponential, inverse)


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    value = sigmoid(*primals)
    return value, tangents[0] * value * (1.0 - value)


def _separate(product: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return bits_float(float_bits(product) & -2)


def gated(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """gate sigmoid(gate) up in float32, of values that bfloat16 holds."""
    return flushed(flushed(gate * sigmoid(gate)) * flushed(up))  # a subnormal gate leaves a subnormal product


def swiglu(gate: BFloat16[Array, "*s"], up: BFloat16[Array, "*s"]) -> BFloat16[Array, "*s"]:
    """`gated`, rounded once."""
    return keep_rounding(gated(as_stored(gate), as_stored(up)).astype(gate.dtype))
