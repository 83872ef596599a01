"""E2M1 rounding of bfloat16 magnitudes by a product with the reciprocal of the block's step: the ladder's results in a third
of the instructions. For the Pallas bodies; `ladder` defines the result and serves every other input.

A bfloat16 magnitude has 8 significant bits, a threshold or a code times an E4M3 step at most 7. Unless they are equal they
differ by more than 2^-9 of themselves, so a quotient that is off by 2^-14 still lies on the right side. The quotient is
therefore computed without care (any division, any contraction) and moved by 2^-14 on purpose: down, where a tie must go to
the smaller code; up, where a value on a code must reach it. E8M0 steps are powers of two, so there the quotient is exact,
is not moved, and ties go to the even code by themselves.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import SMALLEST_NORMAL, bits_float, float_bits
from pallas_kernels.formats import BlockFormat

_NUDGE = 2.0**-14
_EXPONENT = 0x7F800000
_ONE = 127 << 23
_CODE = 1 << 22  # the distance between the bits of two neighbouring codes from 1 to 6
_REST = _CODE - 1
_SLACK = 1 << 11
"""The nudge moves the bits of a code, or of the middle of two, by less; a bfloat16 value next to them is further away."""


def nearest_index(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..7 nearest to a / step. Where step is zero or NaN the caller replaces it."""
    y = jnp.minimum(a * _reciprocal(step, fmt, _NUDGE), 6.0)
    # From y + 1 below one, and 2 y from there on, the codes 0..7 are _CODE apart in the bits.
    bits = float_bits(y + jnp.maximum(y, 1.0))
    half = (_CODE // 2 - 1) + ((bits >> 22) & 1) if fmt.scale == "e8m0" else _CODE // 2 - _SLACK
    return ((bits + half) >> 22) - (127 << 1)


def nearest_value(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Float[Array, "*s"]:
    """Magnitude of the code nearest to a / step. Where step is zero the caller multiplies by zero."""
    y = jnp.minimum(a * _reciprocal(step, fmt, -_NUDGE), 6.0)
    # A power of two whose last bit is the distance of the codes around y: the sum rounds y to them.
    magic = bits_float(_exponent(y) + (22 << 23))
    return (y + magic) - magic


def lower_index(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..6 of the lower of the two codes around a / step; a clipped magnitude has the bracket {4, 6}."""
    bits, offset = _shifted(a, step, fmt)
    return (bits >> 22) - jnp.where(offset > 0.0, 254, 252)


def value_with_low_bit(
    a: Float[Array, "*s"], step: Float[Array, "*#s"], bit: Int[Array, "*s"], known: Bool[Array, "*#s"], fmt: BlockFormat
) -> Float[Array, "*s"]:
    """Magnitude of the code next to a / step whose low bit is `bit`, of the nearest one where the bit is not known.

    A magnitude on a code stays there; a subnormal one counts as zero here as everywhere.
    """
    bits, offset = _shifted(a, step, fmt)
    # The sum reaches _CODE where the way leads up: known, from anywhere off the code; else from past the middle.
    if fmt.scale == "e8m0":
        past = (bits & _REST) + jnp.where(known, _CODE - 1, _CODE // 2 - 1) + jnp.where(known, 0, 1) * ((bits >> 22) & 1)
    else:
        past = (bits & _REST) + jnp.where(known, _CODE - _SLACK, _CODE // 2 - _SLACK)
    differs = (bits ^ (bit << 22)) | jnp.where(known, 0, -1)
    return bits_float((bits & ~_REST) + (differs & past & _CODE)) - offset


def _shifted(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> tuple[Int[Array, "*s"], Float[Array, "*s"]]:
    """Float bits of a / step + offset; the offset of 1 below 1 makes the codes 0 and .5 look like those from 1 on.

    5.5 stands for everything clipped: in the bracket {4, 6}, on no code, nearer to 6. 2^-10 stands for everything that is
    closer to zero without being zero.
    """
    y = jnp.where(a >= SMALLEST_NORMAL, jnp.clip(a * _reciprocal(step, fmt, _NUDGE), 2.0**-10, 5.5), 0.0)
    offset = jnp.where(y < 1.0, 1.0, 0.0)
    return float_bits(y + offset), offset


def _reciprocal(step: Float[Array, "*b"], fmt: BlockFormat, nudge: float) -> Float[Array, "*b"]:
    """1 / step, moved; 1 for a step of zero or NaN, under which any finite quotient will do."""
    return (1.0 if fmt.scale == "e8m0" else 1.0 + nudge) / jnp.where(step > 0.0, step, 1.0)


def _exponent(y: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Exponent bits of y, at least those of one: below one the codes are as far apart as from one to two."""
    return jnp.maximum(float_bits(y) & _EXPONENT, _ONE)
