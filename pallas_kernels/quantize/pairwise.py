"""NVFP4 codes of pairs of bfloat16 values: the codes of `ladder.nearest_index`, packed, in half of the instructions.

For each pair of values (numbers as in the code):

1. h = |x| * gain / 2^exponent(step), at most the largest magnitude worth telling apart (`pair_terms`); 0 in a block without a scale.
2. y = h / mantissa, and z = y + max(y, 1): the bits of the codes 0 to 7 are then multiples of 2^9. A tie is not above the middle.
3. The code is what z reaches when a little less than half a code is added.

Then eight codes, each with its sign in the highest bit of its half, become a word (`packed`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import float_bits
from pallas_kernels.formats import E4M3_NAN
from pallas_kernels.pair_terms import (
    BOTH,
    DOWN,
    NO_SHIFT,
    ONE,
    STEP_SHIFT,
    clipped_word,
    mantissa_index,
    reciprocal_word,
    shift_word,
    small_step,
)

CODE_ZERO = ONE - 0xFF
"""The bits of z at code 0, less just under half a code."""

_LOWEST_FIELD = 127 - 100


def fits(multipliers: Float[Array, " n"]) -> Bool[Array, ""]:
    """Whether the rule is exact under multipliers: from 2^-100 on, where every subnormal magnitude becomes zero, as it should."""
    return jnp.min(float_bits(multipliers)) >= _LOWEST_FIELD << 23


def nearest(op, x, number, constants):
    """The rule, for `pairs.apply` with `nearest_constants` and `packed`: each half holds the sign of x and from bit 9 on the code."""
    shift, clipped, reciprocal = constants
    h = op("shl", op("clamped_sum_s16", op("and", x, 0x7FFF7FFF), shift, clipped), 3)  # 1
    y = op("mul_f16", h, reciprocal)  # 2
    z = op("add_f16", y, op("max_f16", y, ONE * BOTH))
    code = op("add", z, 2**32 - CODE_ZERO * BOTH)  # 3
    return op("or", code, op("and", x, 0x80008000))


def packed(op, words):
    """Codes of whole octets, four bits each, a word for each octet; a sign on code 0 is dropped."""
    return [_octet(op, words[start : start + 4]) for start in range(0, len(words), 4)]


def _octet(op, words):
    first, second = (op("bytes", low, high, 0x7531) for low, high in (words[:2], words[2:]))
    even, odd = op("bytes", first, second, 0x6420), op("bytes", first, second, 0x7531)
    # A byte holds the sign in bit 7, the code in bits 1 to 3, and a remainder in bit 0.
    low = _select(op, op("shr", even, 1), op("shr", even, 4), 0x07070707)
    high = _select(op, op("shl", odd, 3), odd, 0x70707070)
    word = _select(op, low, high, 0x0F0F0F0F)
    # Adding 7 to a magnitude carries into the sign's bit unless it is 0.
    nonzero = op("add", op("and", word, 0x77777777), 0x77777777)
    return op("and", word, op("or", nonzero, 0x77777777))


def _select(op, chosen, other, mask: int):
    """Bits of `chosen` where the mask is set, else those of the other word."""
    return op("or", op("and", chosen, mask), op("and", other, mask ^ 0xFFFFFFFF))


def nearest_constants(scales: Int[Array, " n"], gain: Float[Array, " #n"]) -> list[Int[Array, " n"]]:
    """The constants of the rule for every group, from its scale byte and 2^n."""
    step = small_step(scales)
    k = mantissa_index(step)
    has_scale = (scales > 0) & (scales < E4M3_NAN)
    shift = shift_word(jnp.where(has_scale, (float_bits(gain) >> 23) - (float_bits(step) >> 23) - STEP_SHIFT, NO_SHIFT))
    return [shift, clipped_word(k, 0), reciprocal_word(k, DOWN)]
