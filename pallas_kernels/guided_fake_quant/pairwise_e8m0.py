"""The guided rounding rule on pairs of bfloat16 values under E8M0 scales: the results of `rule` for every kind of record and every byte.

For each pair of values (numbers as in the code):

1. h = |x| / 2^(byte - 127) in float16, between 2^-8, which stands for everything closer to zero, and 5.5, for everything clipped.
2. z = h + max(h, 1): the bits of the codes 0 to 7 are then multiples of 2^9. It is exact from an eighth on, and no code, nor the middle
   of two, lies between zero and there.
3. The code below z and the one that z reaches with an addition differ, unless z is on a code, and then by one. The way up is taken
   where the record asks for it. If there is none it is always taken: then the addition reaches from the middle only, from the middle
   itself where the lower code is odd.
4. From z back to the magnitude, as bfloat16; zero where x counts as zero. No other value becomes subnormal, so nothing else is flushed.
5. With the sign, times the scale in two steps, since one alone may lie outside bfloat16: exact, and never -0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.arithmetic import INFINITY_BITS, QUIET_NAN_BITS, scale_code
from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.pair_terms import BOTH, ONE, double, double_high, e8m0_floor, e8m0_offset, e8m0_top

_FROM_A_CODE, _FROM_THE_MIDDLE = 0x1FF, 0x0FF
_HALF = 0x3800
_CODE_BIT = 0x200 * BOTH
_SIGNS = 0x80008000
_LIFT = 127 + 112
"""The exponent of 2^112: the bits of a float16 number, three places further right, mean 2^-112 of it in bfloat16."""


def guided_by_bit(op, x, number, constants):
    """The rule for mantissa records, a word of which holds the bits of an octet (`pairwise.record_words`)."""
    record, *block = constants
    low_bit = op("shl", record, 9 - 2 * number)
    return _guided(op, x, block, lambda z: op("xor", z, low_bit))


def guided_by_code(op, x, number, constants):
    """The rule for records of codes, eight in a word: up is the way to a recorded code above x, in the sign frame of x."""
    record, *block = constants
    codes = op("shr", record, 8 * number)
    halves = op("or", op("and", codes, 0xF), op("and", op("shl", codes, 12), 0xF0000))
    position = op("add", op("and", op("shl", halves, 9), 0x0E000E00), ONE * BOTH)
    sign = op("and", op("xor", op("shl", halves, 12), x), _SIGNS)
    recorded = op("or", position, sign)
    return _guided(op, x, block, lambda z: op("shr", op("less_f16", z, recorded), 1))


def _guided(op, x, constants, upwards):
    """The rule; `upwards` gives a word with bit 9 set in the halves for which the record asks for the upper code."""
    floor, top, offset, reach, unknown, smallest, lift, factor = constants
    magnitude = op("and", x, 0x7FFF7FFF)
    h = op("mad", op("max_u16", op("min_u16", magnitude, top), floor), 8, offset)  # 1
    z = op("add_f16", h, op("max_f16", h, ONE * BOTH))  # 2
    odd = op("and", op("and", op("shr", z, 9), BOTH), unknown)
    reached = op("add", op("add", z, reach), odd)  # 3
    leaves = op("and", op("or", upwards(z), unknown), op("xor", z, reached))
    code = op("add", op("and", z, 0xFE00FE00), op("and", leaves, _CODE_BIT))
    value = op("sub_f16", code, op("max_f16", op("mul_f16", code, _HALF * BOTH), ONE * BOTH))  # 4
    kept = op("and", op("shr", value, 3), op("reached_bf16", magnitude, smallest))
    signed = op("or", kept, op("and", x, _SIGNS))
    return op("fma_bf16", op("fma_bf16", signed, lift, 0), factor, 0)  # 5


def guided_constants(
    amax_bits: Int[Array, " n"], rollout_scales: Int[Array, " n"], valid: Bool[Array, " #n"], kind: str
) -> list[Int[Array, " #n"]]:
    """The constants of the rules for every group, but for the record."""
    byte = jnp.where(valid, rollout_scales, scale_code(amax_bits, None))
    known = valid & (kind != "scales")
    # x is zero if its product with the gain, 2^(127 - byte) but at least 2^-126, is smaller than any normal number.
    smallest = jnp.maximum(jnp.minimum(byte, 253) - 126, 1) << 7
    factor = jnp.where((byte == E8M0_NAN) | (amax_bits >= INFINITY_BITS), QUIET_NAN_BITS, jnp.maximum(byte, 1) << 23)
    return [
        e8m0_floor(byte),
        e8m0_top(byte),
        e8m0_offset(byte),
        double(jnp.where(known, _FROM_A_CODE, _FROM_THE_MIDDLE)),
        jnp.where(known, 0, -1),
        double(smallest),
        double(jnp.where(byte == 0, _LIFT - 1, _LIFT) << 7),
        double_high(factor),
    ]
