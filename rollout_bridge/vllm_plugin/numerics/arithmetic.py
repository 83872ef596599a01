"""The arithmetic of the formats: integer operations on float32 bits, comparisons and exact products, as in docs/numerics.md.

Elementwise; shapes broadcast. Float32 subnormals count as zero, on the way in and on the way out, on every device.
"""

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.numerics.formats import E2M1_MIDPOINTS, E4M3_MAX, E4M3_NAN, E8M0_NAN, RECIPROCAL_SIX

INFINITY_BITS = 0x7F800000
SMALLEST_NORMAL = 2.0**-126
_SMALLEST_NORMAL_BITS = 0x00800000


def float_bits(x: Tensor) -> Tensor:
    """The bit pattern of float32 values as int32."""
    return x.view(torch.int32)


def bits_float(bits: Tensor) -> Tensor:
    """The float32 values of int32 bit patterns."""
    return bits.view(torch.float32)


def magnitude_bits(x: Tensor) -> Tensor:
    """int32 bits of |x|, float32, with subnormals set to zero. >= INFINITY_BITS means not finite."""
    bits = float_bits(x) & 0x7FFFFFFF
    return bits.masked_fill(bits < _SMALLEST_NORMAL_BITS, 0)


def multiplier_bits(amax_bits: Tensor, nudged: bool) -> Tensor:
    """int32 bits of the decode multiplier 2^-n, times (1 + 2^-17) if nudged; n the largest integer with amax * 2^n <= 2688."""
    n = 138 - (amax_bits >> 23) - ((amax_bits & 0x7FFFFF) > 0x280000).to(torch.int32)  # 2688 = 1.3125 * 2^11
    n = n.clamp(-126, 126).masked_fill((amax_bits == 0) | (amax_bits >= INFINITY_BITS), 0)
    return ((127 - n) << 23) | (0x40 if nudged else 0)


def encode_gain(multiplier: Tensor) -> Tensor:
    """2^n for a float32 decode multiplier in [2^-n, 2^(1-n))."""
    exponent = (float_bits(multiplier) >> 23) & 0xFF
    return bits_float((254 - exponent).clamp(1, 253) << 23)


def e4m3_code(v: Tensor) -> Tensor:
    """int32 E4M3 byte nearest to float32 v in [0, 448], ties to even.

    The sum with a power of two whose last bit is the grid step at v rounds v; its low bits then count the grid.
    """
    exponent = (float_bits(v) & 0x7F800000).clamp(min=121 << 23)
    return (float_bits(v + bits_float(exponent + (20 << 23))) + (exponent >> 20) - (121 << 3)) & 0x7F


def e4m3_value(code: Tensor) -> Tensor:
    """float32 value of int32 scale bytes; NaN outside 0x00..0x7E."""
    value = torch.where(code < 8, code.to(torch.float32) * 2.0**-9, bits_float((code << 20) + (120 << 23)))
    return value.masked_fill(code > 0x7E, torch.nan)


def e2m1_magnitude(index: Tensor) -> Tensor:
    """float32 magnitude of the int32 codes 0..7."""
    return torch.where(index < 2, index.to(torch.float32) * 0.5, bits_float((index << 22) + (126 << 23)))


def scale_code(amax_bits: Tensor, gain: Tensor | None) -> Tensor:
    """int32 scale byte of blocks of the given magnitude: E4M3 under gain = 2^n, E8M0 if gain is None."""
    if gain is not None:
        scaled = (bits_float(amax_bits) * gain) * RECIPROCAL_SIX
        # fmin, unlike clamp, drops the NaN of a block that is marked below anyway.
        code = e4m3_code(torch.fmin(scaled, torch.full_like(scaled, E4M3_MAX)))
        return code.masked_fill(amax_bits >= INFINITY_BITS, E4M3_NAN)
    # The EVEN rule: the power of two of amax rounded up from mantissa 1.75, over 4 (the exponent of 6).
    code = (((amax_bits + (1 << 21)) >> 23) - 2).clamp(0, 254)
    return code.masked_fill(amax_bits >= INFINITY_BITS, E8M0_NAN)


def encode_terms(code: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gain, step) of a block: the magnitude v of the format stands for the input |x| with |x| * gain = v * step."""
    if gain is not None:
        return gain, e4m3_value(code)
    # 2^(127 - byte); byte 254 would need a subnormal, so it takes twice the gain and twice the step.
    gain = bits_float((254 - code.clamp(max=253)) << 23)
    step = torch.ones_like(gain).masked_fill(code == 254, 2.0)
    return gain, step.masked_fill(code == E8M0_NAN, torch.nan)


def nearest_index(a: Tensor, step: Tensor, ties_to_even: bool) -> Tensor:
    """int32 code 0..7 nearest to a / step, float32; ties toward zero or to the even code; 0 where step is zero or NaN."""
    index = torch.zeros(a.shape, dtype=torch.int32, device=a.device)
    for place, midpoint in enumerate(E2M1_MIDPOINTS):
        threshold = midpoint * step
        index += (a >= threshold) if ties_to_even and place % 2 else (a > threshold)
    return index.masked_fill(step == 0, 0)


def decode_factor(code: Tensor, multiplier: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(factor, pre) of a block: the magnitude v decodes to (v * pre) * factor; pre None stands for one."""
    if multiplier is not None:
        factor = e4m3_value(code) * multiplier
        return factor.masked_fill(factor < SMALLEST_NORMAL, 0.0), None
    factor = bits_float(code.clamp(min=1) << 23)
    pre = torch.ones_like(factor).masked_fill(code == 0, 0.5)
    return factor.masked_fill(code == E8M0_NAN, torch.nan), pre


def signed_value(magnitude: Tensor, negative: Tensor, factor: Tensor, pre: Tensor | None) -> Tensor:
    """bfloat16 of magnitude * factor with the sign; never -0."""
    value = (magnitude if pre is None else magnitude * pre) * factor
    value = value.masked_fill(value < SMALLEST_NORMAL, 0.0).to(torch.bfloat16)
    return torch.where(negative & (value != 0), -value, value)
