"""MXFP4 codes of pairs of bfloat16 values: the codes of `ladder.nearest_index`, ties to even, under every scale byte.

For each pair of values (numbers as in the code):

1. y = |x| / 2^(byte - 127) in float16, at least 2^-8 (`pair_terms`): below 7 in the block's own scale, and exact where that matters.
2. z = y + max(y, 1): the bits of the codes 0 to 7 are then multiples of 2^9.
3. The code is what z reaches when just less than half a code is added, or half a code where the code below z is odd.
4. Subnormal numbers count as zero.

The word has the form that `pairwise.packed` takes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.pair_terms import BOTH, ONE, e8m0_floor, e8m0_offset
from pallas_kernels.quantize.pairwise import CODE_ZERO

_NO_SCALE = 264
"""A scale byte, if there were one, under which every bfloat16 magnitude, and every pattern that is none, is small."""


def nearest(op, x, number, constants):
    """The rule, for `pairs.apply` with `nearest_constants` and `packed`: each half holds the sign of x and from bit 9 on the code."""
    floor, offset = constants
    magnitude = op("and", x, 0x7FFF7FFF)
    y = op("mad", op("max_u16", magnitude, floor), 8, offset)  # 1
    z = op("add_f16", y, op("max_f16", y, ONE * BOTH))  # 2
    odd = op("and", op("shr", z, 9), BOTH)
    code = op("add", op("add", z, odd), 2**32 - CODE_ZERO * BOTH)  # 3
    normal = op("reached_bf16", magnitude, 0x80 * BOTH)
    return op("and", op("or", code, op("and", x, 0x80008000)), normal)  # 4


def nearest_constants(scales: Int[Array, " n"]) -> list[Int[Array, " n"]]:
    """The constants of the rule for every group, from its own scale byte."""
    byte = jnp.where(scales == E8M0_NAN, _NO_SCALE, scales)
    return [e8m0_floor(byte), e8m0_offset(byte)]
