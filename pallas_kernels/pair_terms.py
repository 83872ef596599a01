"""What the pairwise rules know of a block: int32 words with the same 16-bit number in both halves, one for each group.

NVFP4. A bfloat16 magnitude becomes a float16 one by shifting its bits three to the left, once its exponent fits. So the exponents of the
gain and of the block's step come off as an integer, and what is left of the division by the step, its mantissa 1 + k/8, is a
product with a float16 reciprocal:

    |x| * gain / step = h / mantissa,    h = |x| * gain / 2^exponent(step), exact in float16

The reciprocal is rounded to the side on which a tie, or a value on a code, has to end up, and every other value is too far from
those to follow: `tests/pallas_kernels/test_pairwise.py` tries them all.

MXFP4. The scale is a power of two, so the quotient is a change of the exponent, within bounds that float16 has room for: exact.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels import pairs
from pallas_kernels.arithmetic import float_bits

BOTH = 0x10001
"""What a number of 0 to 65535 is multiplied with to stand in both halves of a word."""

ONE = 0x3C00
"""1 in float16."""

STEP_SHIFT = 8
"""`step_terms` gives the step times 2^-8: what the bits of an E4M3 number mean in float16, three further left."""

UP, DOWN = 0.49, -0.4
NO_SHIFT = (127 - 15) - 256

_UNBIAS = (127 - 15) << 7
"""Difference of the exponent fields of bfloat16 and float16, in bits of bfloat16."""


def double(half: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """A word with a number of 0 to 65535 in both halves."""
    return half * BOTH


def double_high(bits: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """A word with the upper half of bits that are not negative in both halves."""
    return (bits & -0x10000) | (bits >> 16)


def small_step(code: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """E4M3 bytes 0x00..0x7E times 2^-8; other bytes give something."""
    return jax.lax.bitcast_convert_type((code << 7).astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def shift_word(exponent: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """What to add to the bits of |x| so that those of h remain, three places further right: h = |x| * 2^exponent.

    An exponent of `NO_SHIFT`, the lowest, turns every magnitude negative. The highest is 111, and there a subnormal one is negative.
    """
    # Made so that no half borrows from the other: from 0 for the lowest exponent up to 0x7F80, and then less 0x8000.
    return (exponent - NO_SHIFT) * (0x80 * BOTH) - 0x7FFF8000


def mantissa_index(step: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """k of a step with the mantissa 1 + k/8."""
    return (float_bits(step) >> 20) & 7


def mantissa_word(k: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """1 + k/8 in float16."""
    return k * (0x80 * BOTH) + ONE * BOTH


def clipped_word(k: Int[Array, "*s"], floor: int) -> Int[Array, "*s"]:
    """The largest h worth telling apart, as float16 bits less `floor`, three places further right.

    For every k it is more than 5 and less than 6 times the mantissa: in the bracket {4, 6}, on no code, nearer to 6.
    """
    four = ((127 + 2) << 7) - _UNBIAS
    return k * (16 * BOTH) + (four + 56 - floor) * BOTH


def reciprocal_word(k: Int[Array, "*s"], rounding: Float[Array, "*#s"] | float) -> Int[Array, "*s"]:
    """1 / (1 + k/8) in float16, rounded `UP` or `DOWN`.

    16384 / (8 + k) is 2048, or a number whose fraction lies between .26 and .46, so a careless quotient will do.
    """
    rounded = (16384.0 / (k + 8).astype(jnp.float32) + rounding) + 2.0**23
    return double((float_bits(rounded) - (0x4B000000 - 0x3400)) & 0xFFFF)


def e8m0_floor(byte: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """The magnitude of 2^-8 under an E8M0 scale in bfloat16, zero where that would be subnormal: for everything closer to zero."""
    return double(jnp.maximum(byte - 8, 0) << 7)


def e8m0_top(byte: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """That of 5.5 in bfloat16: in the bracket {4, 6}, on no code, nearer to 6. Beyond bfloat16 it is larger than any magnitude."""
    return double(((byte + 2) << 7) + 0x30)


def e8m0_offset(byte: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """What to add to the bits of a magnitude between the two, three places further left, to have the quotient in float16."""
    return double((15 - byte) << 10)


def amax_bits(octets: list[BFloat16[Array, "n 8"]], interpret: bool) -> Int[Array, " n"]:
    """Float bits of the largest magnitude of each group; subnormal ones are kept."""
    return pairs.apply(_magnitude, octets, [], jnp.uint32, interpret, _largest).astype(jnp.int32)


def _magnitude(op, x, number, constants):
    return op("and", x, 0x7FFF7FFF)


def _largest(op, words):
    while len(words) > 1:
        words = [op("max_u16", *two) for two in zip(words[::2], words[1::2], strict=True)]
    return [op("and", op("max_u16", words[0], op("shl", words[0], 16)), 0xFFFF0000)]
