"""Values of pairs of codes as bfloat16: those of `arithmetic.stored_value`, in a third of the instructions.

For each pair of codes (numbers as in the code):

1. One multiplication puts the code of each half at two places: its sign on top, its magnitude at the lowest bits of the exponent.
2. There the magnitude reads as 2^-126 of itself, the subnormal 0.5 included, and is lifted.
3. The product with the block's factor is exact where no multiplier or scale makes it subnormal, and never -0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import bits_float, e4m3_value, float_bits
from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.pair_terms import double_high

_LOWEST_FIELD, _HIGHEST_FIELD = 127 - 100, 127 + 100
_SURPLUS = 0x7FE000
"""The bits of a multiplier's mantissa down to 2^-10: less than that is lost in the rounding to bfloat16."""

_LOWEST_SCALE, _HIGHEST_SCALE = 3, 252
"""E8M0 bytes with which the magnitudes 0.5 to 6 become normal numbers."""


def decoded(op, word, number, constants):
    """The rule, for `pairs.expand` with `constants`."""
    (factor,) = constants
    codes = op("shr", word, 8 * number)
    halves = op("or", op("and", codes, 0xF), op("and", op("shl", codes, 12), 0xF0000))
    placed = op("and", op("mul", halves, 0x1040), 0x81C081C0)  # 1
    return op("fma_bf16", op("lift_bf16", placed), factor, 0)  # 2, 3


def fits(scales: Int[Array, " n"], multipliers: Float[Array, " #n"] | None) -> Bool[Array, ""]:
    """Whether the rule is exact: under multipliers of about 2^-n, |n| <= 100, or without them under scales that are not extreme."""
    if multipliers is None:
        within = ((scales >= _LOWEST_SCALE) & (scales <= _HIGHEST_SCALE)) | (scales == E8M0_NAN)
    else:
        bits = float_bits(multipliers)
        within = (bits >> 23 >= _LOWEST_FIELD) & (bits >> 23 <= _HIGHEST_FIELD) & (bits & _SURPLUS == 0)
    return jnp.max(jnp.where(within, 0, 1)) == 0


def constants(scales: Int[Array, " n"], multipliers: Float[Array, " #n"] | None) -> list[Int[Array, " n"]]:
    """The constant of the rule for every group: its factor in both halves."""
    if multipliers is None:
        factor = jnp.where(scales == E8M0_NAN, jnp.nan, bits_float(scales << 23))
    else:
        factor = e4m3_value(scales) * bits_float(float_bits(multipliers) & 0x7F800000)
    return [double_high(float_bits(factor))]
