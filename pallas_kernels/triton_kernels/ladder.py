"""E2M1 rounding by exact comparisons, for any float32 magnitude: `pallas_kernels.ladder` as Triton device functions.

The magnitude is `a` where `positive` and zero elsewhere, as `scaled_magnitude` gives both. Where the step is zero or NaN any value will do,
since it is multiplied by zero or NaN; the code there is 0.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels.arithmetic import e2m1_value


@triton.jit
def nearest_field(a, positive, step, SCALE: tl.constexpr):
    """Code 0..7 nearest to a / step, in the bits 28 to 30."""
    return _nearest_index(a, positive, step, SCALE) << 28


@triton.jit
def nearest_value(a, positive, step, SCALE: tl.constexpr):
    """Magnitude of the code nearest to a / step."""
    return e2m1_value(_nearest_index(a, positive, step, SCALE))


@triton.jit
def value_with_low_bit(a, positive, step, bit, known, SCALE: tl.constexpr):
    """Magnitude of the code next to a / step whose low bit is `bit`, of the nearest one where the bit is not known."""
    a = tl.where(positive, a, 0.0)
    lower = _lower_index(a, step)
    return _neighbour(a, step, lower, (lower & 1) != bit, known, SCALE)


@triton.jit
def value_towards(a, positive, step, index, known, SCALE: tl.constexpr):
    """Magnitude of the code next to a / step that is nearer to the code `index`, of the nearest one where that is not known."""
    a = tl.where(positive, a, 0.0)
    lower = _lower_index(a, step)
    return _neighbour(a, step, lower, index > lower, known, SCALE)


@triton.jit
def _nearest_index(a, positive, step, SCALE: tl.constexpr):
    """The midpoints that a / step has passed. A tie goes to the smaller code, in MXFP4 to the even one."""
    a = tl.where(positive, a, 0.0)
    count = _above(a, 0.25 * step) + _above(a, 1.25 * step) + _above(a, 2.5 * step) + _above(a, 5.0 * step)
    if SCALE == "e8m0":
        return count + _reached(a, 0.75 * step) + _reached(a, 1.75 * step) + _reached(a, 3.5 * step)
    else:
        return count + _above(a, 0.75 * step) + _above(a, 1.75 * step) + _above(a, 3.5 * step)


@triton.jit
def _lower_index(a, step):
    """Code 0..6 of the lower of the two codes around a / step; a clipped magnitude has the bracket {4, 6}."""
    small = _reached(a, 0.5 * step) + _reached(a, step) + _reached(a, 1.5 * step)
    return small + _reached(a, 2.0 * step) + _reached(a, 3.0 * step) + _reached(a, 4.0 * step)


@triton.jit
def _neighbour(a, step, index, wants_upper, known, SCALE: tl.constexpr):
    lower, upper = e2m1_value(index), e2m1_value(index + 1)
    middle = (0.5 * (lower + upper)) * step
    nearer_upper = a > middle
    if SCALE == "e8m0":
        nearer_upper |= (a == middle) & ((index & 1) == 1)
    off_code = (a != lower * step) | (a >= 6.0 * step)
    return tl.where(tl.where(known, wants_upper & off_code, nearer_upper), upper, lower)


@triton.jit
def _above(a, edge):
    return (a > edge).to(tl.int32)


@triton.jit
def _reached(a, edge):
    return (a >= edge).to(tl.int32)
