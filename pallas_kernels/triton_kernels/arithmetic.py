"""The arithmetic of `pallas_kernels.arithmetic` as Triton device functions.

SCALE is the format's scale encoding, "e4m3" or "e8m0".
"""

import triton
import triton.language as tl

from pallas_kernels import formats

RECIPROCAL_SIX = tl.constexpr(formats.RECIPROCAL_SIX)
E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E4M3_NAN = tl.constexpr(formats.E4M3_NAN)
E8M0_NAN = tl.constexpr(formats.E8M0_NAN)

SIGN_BIT = tl.constexpr(-0x80000000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
QUIET_NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def bits_float(bits):
    """The float32 values of int32 bit patterns."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float_bits(x):
    """Bit patterns, int32, of values as float32."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def block_amax_bits(bits):
    """The largest magnitude bits of each group, [TILE, 1]; >= INFINITY_BITS means not finite."""
    amax = tl.max(bits & MAGNITUDE, axis=1, keep_dims=True)
    return tl.where(amax < SMALLEST_NORMAL_BITS, 0, amax)


@triton.jit
def encode_gain(multiplier):
    """2^n for a decode multiplier in [2^-n, 2^(1-n))."""
    exponent = (float_bits(multiplier) >> 23) & 0xFF
    return bits_float(tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23)


@triton.jit
def e4m3_code(v):
    """E4M3 byte nearest to v in [0, 448], ties to even."""
    exponent = tl.maximum(float_bits(v) & INFINITY_BITS, 121 << 23)
    return (float_bits(v + bits_float(exponent + (20 << 23))) + (exponent >> 20) - (121 << 3)) & 0x7F


@triton.jit
def e4m3_value(code):
    """Value of a scale byte; bytes outside 0x00..0x7E are no scales and give NaN."""
    value = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(code > 0x7E, float("nan"), value)


@triton.jit
def e2m1_value(index):
    """Magnitude of the codes 0..7: their three bits are the lowest of a float16 exponent and the highest of its mantissa."""
    return (index << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0**14


@triton.jit
def scale_code(amax_bits, gain, SCALE: tl.constexpr):
    """Scale byte of blocks with the given magnitude; a block that is not finite gets the NaN byte."""
    if SCALE == "e4m3":
        code = e4m3_code(tl.minimum((bits_float(amax_bits) * gain) * RECIPROCAL_SIX, E4M3_MAX))
        return tl.where(amax_bits >= INFINITY_BITS, E4M3_NAN, code)
    else:
        code = tl.minimum(tl.maximum(((amax_bits + (1 << 21)) >> 23) - 2, 0), 254)
        return tl.where(amax_bits >= INFINITY_BITS, E8M0_NAN, code)


@triton.jit
def encode_terms(code, gain, SCALE: tl.constexpr):
    """(gain, step) of a block: the magnitude v of the format stands for the input |x| with |x| * gain = v * step."""
    if SCALE == "e4m3":
        return gain, e4m3_value(code)
    else:
        step = tl.where(code == 254, 2.0, 1.0)
        return bits_float((254 - tl.minimum(code, 253)) << 23), tl.where(code == E8M0_NAN, float("nan"), step)


@triton.jit
def scaled_magnitude(bits, gain, step):
    """(|x| * gain, whether it counts as more than zero) of float bits.

    It does not where |x| or the product is subnormal, nor in a block whose step is zero or NaN.
    """
    magnitude = bits_float(bits & MAGNITUDE)
    smallest = bits_float((tl.maximum(254 - (float_bits(gain) >> 23), 127) - 126) << 23)
    return magnitude * gain, magnitude >= tl.where(step > 0.0, smallest, float("nan"))


@triton.jit
def decode_terms(code, multiplier, SCALE: tl.constexpr):
    """(factor, pre) of a block: the magnitude v decodes to (v * pre) * factor."""
    if SCALE == "e4m3":
        factor = e4m3_value(code) * multiplier
        return tl.where(factor < SMALLEST_NORMAL, 0.0, factor), 1.0
    else:
        factor = bits_float(tl.maximum(code, 1) << 23)
        return tl.where(code == E8M0_NAN, float("nan"), factor), tl.where(code == 0, 0.5, 1.0)


@triton.jit
def stored_value(value, sign_bits, factor, pre, DTYPE: tl.constexpr):
    """RN_bf16((value * pre) * factor) with the sign, as DTYPE; never -0."""
    product = (value * pre) * factor
    if DTYPE == tl.bfloat16:
        # Nothing reads the cast back here, so no compiler folds it.
        signed = bits_float(float_bits(product) | (sign_bits & SIGN_BIT))
        return tl.where(product < SMALLEST_NORMAL, 0.0, signed).to(tl.bfloat16)
    else:
        bits = tl.minimum(float_bits(product) & MAGNITUDE, QUIET_NAN_BITS)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        signed = bits_float(bits | (sign_bits & SIGN_BIT))
        return tl.where(bits < SMALLEST_NORMAL_BITS, 0.0, signed).to(DTYPE)
