"""E2M1 rounding of bfloat16 magnitudes by a product with the reciprocal of the block's step: the ladder's results in a third
of the instructions. For the Pallas bodies; `ladder` defines the result and serves every other input.

A bfloat16 magnitude has 8 significant bits, a threshold or a code times an E4M3 step at most 7. Unless they are equal they
differ by more than 2^-9 of themselves, so a quotient that is off by 2^-14 still lies on the right side. The quotient is
therefore computed without care (any division, any contraction) and moved by 2^-14 on purpose: down, where a tie must go to
the smaller code; up, where a value on a code must reach it. E8M0 steps are powers of two, so there the quotient is exact,
is not moved, and ties go to the even code by themselves.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import bits_float, float_bits
from pallas_kernels.formats import BlockFormat
from pallas_kernels.ladder import Bracket

_NUDGE = 2.0**-14
_MARGIN = 2.0**-12
_SMALLEST = 2.0**-100
_EXPONENT = 0x7F800000
_ONE = 127 << 23
_KEPT = -0x400000  # sign, exponent and one mantissa bit


def nearest_index(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..7 nearest to a / step; 0 where step is zero or NaN."""
    y = _quotient(a, step, fmt, -_NUDGE, 6.0)
    exponent, magic = _magic(y)
    index = (float_bits(y + magic) + (exponent >> 22) - (127 << 1)) & 7
    return jnp.where(step > 0.0, index, 0)


def nearest_value(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Float[Array, "*s"]:
    """Magnitude of the code nearest to a / step. Where step is zero the caller multiplies by zero."""
    y = _quotient(a, step, fmt, -_NUDGE, 6.0)
    _, magic = _magic(y)
    return (y + magic) - magic


def bracket(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Bracket:
    """The two codes around a / step."""
    # 5.5 stands for everything clipped: in the bracket {4, 6}, on no code, nearer to 6.
    # A quotient too small for float32 is not zero, so only `a` can tell what is.
    y = jnp.maximum(_quotient(a, step, fmt, _NUDGE, 5.5), _SMALLEST)
    bits = float_bits(y)
    below_one, half = y < 1.0, y >= 0.5
    index = jnp.where(below_one, jnp.where(half, 1, 0), (bits >> 22) - 252)
    value = jnp.where(below_one, jnp.where(half, 0.5, 0.0), bits_float(bits & _KEPT))
    gap = bits_float(jnp.maximum(bits & _EXPONENT, _ONE) - (1 << 23))
    middle = value + 0.5 * gap
    if fmt.scale == "e8m0":
        return Bracket(index, value, gap, (a == 0.0) | (y == value), (y > middle) | ((y == middle) & ((index & 1) == 1)))
    return Bracket(index, value, gap, (a == 0.0) | (y <= value * (1.0 + _MARGIN)), y > middle * (1.0 + _MARGIN))


def _quotient(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat, nudge: float, limit: float) -> Float[Array, "*s"]:
    nudged = 1.0 if fmt.scale == "e8m0" else 1.0 + nudge
    # Under a step of zero or NaN every magnitude decodes to zero or NaN, so any finite quotient will do.
    return jnp.minimum(a * (nudged / jnp.where(step > 0.0, step, 1.0)), limit)


def _magic(y: Float[Array, "*s"]) -> tuple[Int[Array, "*s"], Float[Array, "*s"]]:
    """Exponent bits of y, at least those of one, and the power of two whose last bit is E2M1's step at y."""
    exponent = jnp.maximum(float_bits(y) & _EXPONENT, _ONE)
    return exponent, bits_float(exponent + (22 << 23))
