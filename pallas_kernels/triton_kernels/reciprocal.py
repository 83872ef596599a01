"""E2M1 rounding of bfloat16 magnitudes by a reciprocal: `pallas_kernels.reciprocal`, which says why it is exact, as Triton device
functions. Arguments and results are those of `ladder`.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels.arithmetic import INFINITY_BITS, bits_float, float_bits

NUDGE = tl.constexpr(2.0**-14)
CODE = tl.constexpr(1 << 22)  # between the bits of two neighbouring codes
SLACK = tl.constexpr(1 << 11)  # more than the nudge moves them
LOWEST = tl.constexpr(127 << 23)  # the bits of code 0


@triton.jit
def nearest_field(a, positive, step, SCALE: tl.constexpr):
    """Code 0..7 nearest to a / step, in the bits 28 to 30; other bits are arbitrary."""
    y = tl.minimum(tl.where(positive, a, 0.0) * _reciprocal(step, NUDGE, SCALE), 6.0)
    # From y + 1 below one, and 2 y from there on, the codes 0 to 7 are equally far apart in the bits.
    bits = float_bits(y + tl.maximum(y, 1.0))
    if SCALE == "e8m0":
        half = (CODE // 2 - 1) + ((bits >> 22) & 1)
    else:
        half = CODE // 2 - SLACK
    return (bits << 6) + ((half - LOWEST) << 6)


@triton.jit
def nearest_value(a, positive, step, SCALE: tl.constexpr):
    """Magnitude of the code nearest to a / step."""
    y = tl.minimum(tl.where(positive, a, 0.0) * _reciprocal(step, -NUDGE, SCALE), 6.0)
    # A power of two whose last bit is the distance of the codes around y: the sum rounds y to them.
    magic = bits_float(tl.maximum(float_bits(y) & INFINITY_BITS, 127 << 23) + (22 << 23))
    return (y + magic) - magic


@triton.jit
def value_with_low_bit(a, positive, step, bit, known, SCALE: tl.constexpr):
    """Magnitude of the code next to a / step whose low bit is `bit`, of the nearest one where the bit is not known."""
    bits, offset = _shifted(a, positive, step, SCALE)
    return _neighbour(bits, bits ^ (bit << 22), known, SCALE) - offset


@triton.jit
def value_towards(a, positive, step, index, known, SCALE: tl.constexpr):
    """Magnitude of the code next to a / step that is nearer to the code `index`, of the nearest one where that is not known."""
    bits, offset = _shifted(a, positive, step, SCALE)
    first = tl.where(offset > 0.0, LOWEST, LOWEST - 2 * CODE)
    return _neighbour(bits, tl.where(first + (index << 22) > bits, CODE, 0), known, SCALE) - offset


@triton.jit
def _neighbour(bits, wants_upper, known, SCALE: tl.constexpr):
    """The code below `bits` or, if bit 22 of `wants_upper` is set, the next one; the nearest of both where that is not known."""
    # What reaches the next code: from anywhere off the code, or from past the middle.
    if SCALE == "e8m0":
        reach = tl.where(known, CODE - 1, (CODE // 2 - 1) + ((bits >> 22) & 1))
    else:
        reach = tl.where(known, CODE - SLACK, CODE // 2 - SLACK)
    upper = (bits ^ (bits + reach)) & (wants_upper | tl.where(known, 0, -1))
    return bits_float((bits + (upper & CODE)) & -CODE)


@triton.jit
def _shifted(a, positive, step, SCALE: tl.constexpr):
    """Float bits of a / step + offset, offset 1 below 1.

    5.5 stands for everything clipped: in the bracket {4, 6}, on no code, nearer to 6. 2^-10 stands for everything that is closer to zero
    without being zero.
    """
    y = tl.minimum(tl.maximum(a * _reciprocal(step, NUDGE, SCALE), 2.0**-10), 5.5)
    y = tl.where(positive, y, 0.0)
    offset = tl.where(y < 1.0, 1.0, 0.0)
    return float_bits(y + offset), offset


@triton.jit
def _reciprocal(step, nudge: tl.constexpr, SCALE: tl.constexpr):
    if SCALE == "e8m0":
        return tl.where(step == 2.0, 0.5, 1.0)
    else:
        return (1.0 + nudge) / tl.where(step > 0.0, step, 1.0)
