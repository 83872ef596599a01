"""Values of pairs of codes as bfloat16: those of `arithmetic.stored_value`, in a third of the instructions.

For each pair of codes (numbers as in the code):

1. One multiplication puts the code of each half at two places: its sign on top, its magnitude at the lowest bits of the exponent.
2. There the magnitude reads as 2^-126 of itself, the subnormal 0.5 included, and is lifted.
3. The product with the block's factor is exact, and never -0. An E4M3 scale and its multiplier must not make it subnormal; under the
   lowest E8M0 scales it may be, and is zero then.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import QUIET_NAN_BITS, bits_float, e4m3_value, float_bits
from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.pair_terms import BOTH, double, double_high

_LOWEST_FIELD, _HIGHEST_FIELD = 127 - 100, 127 + 100
_SURPLUS = 0x7FE000
"""The bits of a multiplier's mantissa down to 2^-10: less than that is lost in the rounding to bfloat16."""

_LIFT = (127 + 126) << 7
_LARGEST_SUBNORMAL = 0x7F


def decoded(op, word, number, constants):
    """The rule under E4M3 scales, for `pairs.expand` with `constants`."""
    (factor,) = constants
    return op("fma_bf16", op("lift_bf16", _placed(op, word, number), _LIFT * BOTH), factor, 0)  # 2, 3


def decoded_e8m0(op, word, number, constants):
    """The rule under E8M0 scales, with `constants_e8m0`."""
    lift, factor = constants
    value = op("fma_bf16", op("lift_bf16", _placed(op, word, number), lift), factor, 0)  # 2, 3
    subnormal = op("reached_bf16", _LARGEST_SUBNORMAL * BOTH, op("and", value, 0x7FFF7FFF))
    return op("and", value, op("xor", subnormal, 0xFFFFFFFF))


def _placed(op, word, number):
    codes = op("shr", word, 8 * number)
    halves = op("or", op("and", codes, 0xF), op("and", op("shl", codes, 12), 0xF0000))
    return op("and", op("mul", halves, 0x1040), 0x81C081C0)  # 1


def fits(multipliers: Float[Array, " #n"]) -> Bool[Array, ""]:
    """Whether the rule is exact under E4M3 scales: with multipliers of about 2^-n, |n| <= 100."""
    bits = float_bits(multipliers)
    within = (bits >> 23 >= _LOWEST_FIELD) & (bits >> 23 <= _HIGHEST_FIELD) & (bits & _SURPLUS == 0)
    return jnp.max(jnp.where(within, 0, 1)) == 0


def constants(scales: Int[Array, " n"], multipliers: Float[Array, " #n"]) -> list[Int[Array, " n"]]:
    """The constant of the rule for every group: its factor in both halves."""
    factor = e4m3_value(scales) * bits_float(float_bits(multipliers) & 0x7F800000)
    return [double_high(float_bits(factor))]


def constants_e8m0(scales: Int[Array, " n"]) -> list[Int[Array, " n"]]:
    """The constants under E8M0 scales: the scale is the factor. The lowest would be a subnormal one, so its codes are lifted less."""
    factor = jnp.where(scales == E8M0_NAN, QUIET_NAN_BITS, jnp.maximum(scales, 1) << 23)
    return [double(jnp.where(scales == 0, _LIFT - 0x80, _LIFT)), double_high(factor)]
