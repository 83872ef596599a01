"""The guided rounding rule on pairs of bfloat16 values, for mantissa records: the results of `rule` in a third of the instructions.

For each pair of values (numbers as in the code):

1. h = |x| * gain / 2^exponent(step), between a small and the largest magnitude worth telling apart (`pair_terms`).
2. z = h / mantissa, plus 1 below 1: the bits of the codes 0 to 6 are then multiples of 2^9. A value on a code lies at most one unit
   above it, any other at least two.
3. The code below z and the one that z reaches with an addition differ, unless z is on a code, and then by one. The way up is taken
   where the lower code has the wrong low bit, or always if the bit is not known: then the addition reaches from the middle only.
4. Less the 1 of step 2, as bfloat16, with the sign, times the scale: exact, and never -0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.arithmetic import INFINITY_BITS, bits_float, encode_gain, float_bits, scale_code
from pallas_kernels.formats import E4M3_NAN
from pallas_kernels.pair_terms import (
    DOWN,
    STEP_SHIFT,
    UP,
    clipped_word,
    double,
    double_high,
    mantissa_index,
    mantissa_word,
    reciprocal_word,
    shift_word,
    small_step,
)

_SMALL = 7
"""Float16 exponent field of 2^-8, which stands for everything closer to zero, zero included."""

_FROM_A_CODE, _FROM_THE_MIDDLE = 0x1FE, 0x0FF

_LOWEST_FIELD = 127 + 7 - 63
_MUST_BE_ZERO = ~((63 << 23) | 0x1FFF)


def fits(multipliers: Float[Array, " #n"], rollout_multipliers: Float[Array, " #n"]) -> Bool[Array, ""]:
    """Whether the rule is exact under multipliers: each is 2^-n with -7 <= n <= 56, or more by less than 2^-10 of itself.

    Rounding to bfloat16 removes so little from any product of a code and a scale.
    """
    surplus = _surplus(multipliers) | _surplus(rollout_multipliers)
    return jnp.max(jnp.where((surplus & _MUST_BE_ZERO) == 0, 0, 1)) == 0


def _surplus(multipliers: Float[Array, " n"]) -> Int[Array, " n"]:
    return float_bits(multipliers) - (_LOWEST_FIELD << 23)


def guided(op, x, number, constants):
    """The rule for the words of an octet, for `pairs.apply` with the constants of `guided_constants`."""
    record, shift, clipped, mantissa, reciprocal, reach, unknown, smallest, factor = constants
    magnitude = op("and", x, 0x7FFF7FFF)
    h = op("mad", op("clamped_sum_s16", magnitude, shift, clipped), 8, (_SMALL << 10) * 0x10001)  # 1
    below_one = op("less_f16", h, mantissa)
    z = op("fma_f16", h, reciprocal, below_one)  # 2
    reached = op("add", z, reach)  # 3
    low_bit = op("shl", record, 9 - 2 * number)
    wrong = op("or", op("xor", z, low_bit), unknown)
    leaves = op("and", wrong, op("xor", z, reached))
    moves = op("and", op("and", leaves, op("reached_bf16", magnitude, smallest)), 0x02000200)
    code = op("add", op("and", z, 0xFE00FE00), moves)
    value = op("shr", op("sub_f16", code, below_one), 3)  # 4
    return op("fma_bf16", op("or", value, op("and", x, 0x80008000)), factor, 0)


def record_words(record: UInt32[Array, " n"], octets: int) -> list[Int[Array, " n"]]:
    """The record of each octet, from a bit for each value: those of even values in the low half, two apart, the others above."""
    words = []
    for start in range(0, 8 * octets, 16):
        bits = (record >> start).astype(jnp.int32)
        spread = (bits & 0x5555) | ((bits & 0xAAAA) << 15)
        words += [spread, spread >> 8]
    return words[:octets]


def guided_constants(
    amax_bits: Int[Array, " n"],
    rollout_scales: Int[Array, " n"],
    valid: Bool[Array, " #n"],
    multiplier: Float[Array, " #n"],
    rollout_multiplier: Float[Array, " #n"],
) -> list[Int[Array, " #n"]]:
    """The constants of the rule for every group, but for the record, under multipliers that fit."""
    scales = jnp.where(valid, rollout_scales, scale_code(amax_bits, encode_gain(multiplier)))
    power = jnp.where(valid, float_bits(rollout_multiplier), float_bits(multiplier)) & 0x7F800000
    step = small_step(scales)
    # The bits of a float16 number, three places further right, mean 2^-112 of it in bfloat16.
    factor = step * bits_float(power + ((112 + STEP_SHIFT) << 23))
    factor = jnp.where((scales >= E4M3_NAN) | (amax_bits >= INFINITY_BITS), jnp.nan, factor)
    # Under a factor of zero or NaN it does not matter what the rest becomes.
    k = mantissa_index(step)
    exponent = (254 - STEP_SHIFT) - (power >> 23) - (float_bits(step) >> 23)
    # x is zero if its product with the gain is smaller than any normal number.
    smallest = jnp.maximum(power - (126 << 23), 1 << 23)
    return [
        shift_word(exponent - _SMALL),
        clipped_word(k, _SMALL << 7),
        mantissa_word(k),
        reciprocal_word(k, jnp.where(valid, UP, DOWN)),
        double(jnp.where(valid, _FROM_A_CODE, _FROM_THE_MIDDLE)),
        jnp.where(valid, 0, -1),
        double_high(smallest),
        double_high(float_bits(factor)),
    ]
