"""The whole numeric contract once more, in NumPy: slow, plain, and independent of the jnp code.

Real arithmetic is done in float64, where every product of the contract is exact, and the narrow roundings are the casts of
ml_dtypes. Tests compare every implementation with this file, bit for bit. NumPy in, NumPy out.
"""

from typing import TypeAlias

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Integer, UInt8
from numpy.typing import DTypeLike

from pallas_kernels.containers import Guide, Quantized
from pallas_kernels.formats import E2M1_MIDPOINTS, E2M1_VALUES, E4M3_NAN, E8M0_NAN, NVFP4, RECIPROCAL_SIX, BlockFormat
from pallas_kernels.swiglu_fake_quant.rule import LINE, LOG2_E, LOWEST, NEWTON, POWER_OF_TWO

Multiplier: TypeAlias = Float[np.ndarray | np.floating | float, "*#rows"]
"""Decode multiplier that broadcasts against the rows."""

_VALUES = np.array(E2M1_VALUES)
_TINY = 2.0**-126


def decode_multiplier(amax: Float[np.ndarray | np.floating, "*s"], *, nudged: bool = True) -> Float[np.ndarray, "*s"]:
    """2^-n, times (1 + 2^-17) if nudged; n the largest integer with amax * 2^n <= 2688, within -126..126."""
    amax = _float64(amax)
    amax = np.where(np.isfinite(amax), np.abs(amax), 0.0)
    fraction, exponent = np.frexp(amax)
    n = np.clip(np.where(fraction <= 2688 / 4096, 12, 11) - exponent, -126, 126)
    n = np.where(amax == 0, 0, n)
    return np.asarray(np.ldexp(1.0, -n) * (1 + 2.0**-17 if nudged else 1.0), np.float32)


def quantize(x: Float[np.ndarray, "*rows d"], fmt: BlockFormat, multiplier: Multiplier | None = None) -> Quantized:
    """Codes, scales and multiplier of x."""
    if fmt.has_multiplier and multiplier is None:
        multiplier = decode_multiplier(np.max(np.abs(_float64(x)), initial=0.0))
    size = x.shape[-1]
    blocks = _blocks(x, fmt)
    n = _exponent(multiplier, x.shape[:-1])
    scales = _scale_bytes(blocks, n, fmt)
    codes = _nearest_codes(blocks, scales, n, fmt)
    codes = np.where(np.signbit(blocks) & (codes > 0), codes + 8, codes)
    multiplier = None if multiplier is None else np.asarray(multiplier, np.float32)
    packed = pack_codes(_joined(codes, size))
    return Quantized(codes=packed, scales=scales, multiplier=multiplier, size=size, fmt=fmt)


def quantize_four_over_six(x: Float[np.ndarray, "*rows d"], multiplier: Multiplier) -> Quantized:
    """NVFP4 codes and scales, each block under the scale that makes 6 or 4 of its largest magnitude, whichever errs less."""
    fmt, blocks = NVFP4, _blocks(x, NVFP4)
    n = _exponent(multiplier, x.shape[:-1])
    found = []
    for stretched in (blocks, 1.5 * blocks):
        scales = _scale_bytes(stretched, n, fmt)
        index = _nearest_codes(blocks, scales, n, fmt)
        a, step = _normalized(np.abs(blocks), scales, n, fmt)
        with np.errstate(invalid="ignore"):
            squares = _sixteen_bits(np.square((_VALUES[index] * step - a).astype(np.float32)))
            while squares.shape[-1] > 1:
                squares = squares[..., : squares.shape[-1] // 2] + squares[..., squares.shape[-1] // 2 :]
        found.append((index, scales, squares))
    (six, six_scales, six_error), (four, four_scales, four_error) = found
    better = four_error < six_error
    codes = np.where(better, four, six)
    codes = np.where(np.signbit(blocks) & (codes > 0), codes + 8, codes)
    scales = np.where(better[..., 0], four_scales, six_scales)
    multiplier = np.asarray(multiplier, np.float32)
    return Quantized(codes=pack_codes(_joined(codes, x.shape[-1])), scales=scales, multiplier=multiplier, size=x.shape[-1], fmt=fmt)


def _sixteen_bits(x: Float[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    """Float32 rounded to a significand of 16 bits, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7F + ((bits >> 8) & 1)) & 0xFFFFFF00).astype(np.uint32).view(np.float32)


def dequantize(q: Quantized, dtype: DTypeLike = ml_dtypes.bfloat16) -> Float[np.ndarray, "*rows d"]:
    """The values of a quantized tensor."""
    rows, count = q.scales.shape[:-1], q.scales.shape[-1]
    codes = unpack_codes(np.asarray(q.codes), q.size)
    codes = _pad(codes, count * q.fmt.block).reshape(*rows, count, q.fmt.block)
    magnitude = _decoded(_VALUES[codes & 7], np.asarray(q.scales), q.multiplier, q.fmt)
    value = np.where(codes >= 8, -magnitude, magnitude)
    value = np.where(magnitude == 0, 0.0, value)
    return _joined(value, q.size).astype(np.float32).astype(dtype)


def fake_quant(x: Float[np.ndarray, "*rows d"], fmt: BlockFormat, multiplier: Multiplier | None = None) -> Float[np.ndarray, "*rows d"]:
    """The values of the quantized x, in the dtype of x."""
    return dequantize(quantize(x, fmt, multiplier), x.dtype)


def guided_fake_quant(
    x: Float[np.ndarray, "*rows d"], guide: Guide, fmt: BlockFormat, multiplier: Multiplier | None
) -> Float[np.ndarray, "*rows d"]:
    """x rounded under the record."""
    rows, size = x.shape[:-1], x.shape[-1]
    plain = fake_quant(x, fmt, multiplier)
    rollout_multiplier = multiplier if guide.multiplier is None else np.asarray(guide.multiplier)
    blocks = _blocks(x, fmt)
    n = _exponent(rollout_multiplier, rows)
    scales = np.asarray(guide.scales)
    a, step = _normalized(np.abs(blocks), scales, n, fmt)
    lower = np.minimum(sum((a >= v * step).astype(int) for v in E2M1_VALUES[1:]), 6)
    if guide.kind == "scales":
        index = _nearest_codes(blocks, scales, n, fmt)
    else:
        length = scales.shape[-1] * fmt.block
        on_code = (a == _VALUES[lower] * step) & (a < 6 * step)
        if guide.kind == "mantissa":
            bit = _pad(unpack_bits(np.asarray(guide.data), size), length).reshape(blocks.shape)
            upper = (lower & 1) != bit
        else:
            code = _pad(unpack_codes(np.asarray(guide.data), size), length).reshape(blocks.shape)
            value = _VALUES[code & 7] * np.where(code >= 8, -1, 1) * np.where(np.signbit(blocks), -1, 1)
            upper = np.abs(_VALUES[lower + 1] - value) < np.abs(_VALUES[lower] - value)
        index = np.where(upper & ~on_code, lower + 1, lower)
    with np.errstate(invalid="ignore"):
        index = np.where(step == 0, 0, index)
    magnitude = _decoded(_VALUES[index], scales, rollout_multiplier, fmt)
    magnitude = np.where(np.isfinite(blocks).all(axis=-1, keepdims=True), magnitude, np.nan)
    value = np.where(np.signbit(blocks) & (magnitude != 0), -magnitude, magnitude)
    value = _joined(value, size).astype(x.dtype)
    return np.where(np.broadcast_to(np.asarray(guide.valid), rows)[..., None], value, plain)


def residual_fake_quant(
    x: Float[np.ndarray, "*rows d"], channels: Integer[np.ndarray, " c"], fmt: BlockFormat, multiplier: Multiplier | None = None
) -> tuple[Float[np.ndarray, "*rows d"], Float[np.ndarray, "*rows c"]]:
    """x rounded, and what that left over in the channels, rounded under a fourth of the multiplier."""
    rounded = fake_quant(x, fmt, multiplier)
    with np.errstate(all="ignore"):
        left = (x.astype(np.float32) - rounded.astype(np.float32)).astype(x.dtype)
        fourth = None if multiplier is None else np.maximum(np.asarray(multiplier, np.float32) / np.float32(4), np.float32(_TINY))
    return rounded, fake_quant(left[..., channels], fmt, fourth)


def round_to_bf16(x: Float[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    """Float32 values rounded to the nearest bfloat16 value."""
    with np.errstate(invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def fake_quant_fp8(x: Float[np.ndarray, "*rows d"], *, block: int | None = 128) -> Float[np.ndarray, "*rows d"]:
    """x rounded to E4M3 under the smallest power-of-two scale per block that avoids saturation."""
    rows, size = x.shape[:-1], x.shape[-1]
    length = size if block is None else min(block, size)
    count = -(-size // length)
    blocks = _pad(_float64(x), count * length).reshape(*rows, count, length)
    amax = np.max(np.abs(blocks), axis=-1, keepdims=True)
    finite = np.isfinite(amax)
    fraction, exponent = np.frexp(np.where(finite, amax, 0.0))
    exponent = np.clip(exponent + np.where(fraction <= 448 / 512, -9, -8), -126, 126)
    scaled = np.where(finite, blocks, 0.0) * np.ldexp(1.0, -exponent)
    rounded = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    value = np.where(finite, _flushed(rounded * np.ldexp(1.0, exponent)), np.nan)
    value = np.where(value == 0, 0.0, value)
    with np.errstate(over="ignore"):
        return _joined(value, size).astype(np.float32).astype(x.dtype)


def rms_norm(
    x: Float[np.ndarray, "*rows d"], weight: Float[np.ndarray, " d"], inverse: Float[np.ndarray, "*rows 1"]
) -> Float[np.ndarray, "*rows d"]:
    """x normalised by 1 / rms of its rows, which is given: the order of a sum is nobody's contract."""
    with np.errstate(all="ignore"):
        return _float32(_float32(_float64(x) * inverse) * _float64(weight)).astype(x.dtype)


def rotate(
    x: Float[np.ndarray, "*tokens heads head_dim"], cos: Float[np.ndarray, "*tokens half"], sin: Float[np.ndarray, "*tokens half"]
) -> Float[np.ndarray, "*tokens heads head_dim"]:
    """x rotated by cosines and sines, which are given: `first cos - second sin` and `second cos + first sin`."""
    first, second = np.split(_float64(x), 2, axis=-1)
    cos, sin = _float64(cos)[..., None, :], _float64(sin)[..., None, :]
    with np.errstate(all="ignore"):
        low, high = _float32(first * cos) - _float32(second * sin), _float32(second * cos) + _float32(first * sin)
        return _float32(np.concatenate([low, high], axis=-1)).astype(x.dtype)


def sigmoid(x: Float[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    """The sigmoid of `swiglu_fake_quant.rule`, of bfloat16 values, as float64."""
    magnitude = np.minimum(np.abs(_float64(x)), 2 * LOWEST)
    power = np.rint(magnitude * LOG2_E[0])
    fraction = _float32((magnitude * LOG2_E[0] - power) + magnitude * LOG2_E[1])
    total = np.zeros(())
    for coefficient in POWER_OF_TWO[::-1]:
        total = _float32(_less_last_bit(total * fraction) + _float32(coefficient))
    exponential = np.where(magnitude > LOWEST, 0.0, np.ldexp(total, -np.where(np.isnan(power), 0, power).astype(int)))
    divisor = _float32(1 + exponential)
    inverse = _float32(_float32(LINE[0]) - _less_last_bit(_float32(LINE[1]) * divisor))
    for two in NEWTON:
        inverse = _float32(inverse * _float32(_float32(two) - _less_last_bit(inverse * divisor)))
    return np.where(x < 0, _float32(inverse * exponential), inverse)


def swiglu(gate: Float[np.ndarray, "*s"], up: Float[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    """gate sigmoid(gate) up, in the dtype of gate."""
    with np.errstate(all="ignore"):
        return _float32(_float32(_float64(gate) * sigmoid(gate)) * _float64(up)).astype(gate.dtype)


def pack_codes(codes: Integer[np.ndarray, "*rows d"]) -> UInt8[np.ndarray, "*rows bytes"]:
    """Two codes a byte, low nibble first."""
    codes = _pad(np.asarray(codes), codes.shape[-1] + codes.shape[-1] % 2)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def unpack_codes(packed: UInt8[np.ndarray, "*rows bytes"], size: int) -> UInt8[np.ndarray, "*rows d"]:
    """The first `size` codes."""
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :size]


def pack_bits(bits: Integer[np.ndarray, "*rows d"] | Bool[np.ndarray, "*rows d"]) -> UInt8[np.ndarray, "*rows bytes"]:
    """Eight bits a byte, least significant first."""
    return np.packbits(np.asarray(bits).astype(np.uint8), axis=-1, bitorder="little")


def unpack_bits(packed: UInt8[np.ndarray, "*rows bytes"], size: int) -> UInt8[np.ndarray, "*rows d"]:
    """The first `size` bits."""
    return np.unpackbits(packed, axis=-1, count=size, bitorder="little")


def mantissa_bits(codes_packed: UInt8[np.ndarray, "*rows bytes"], size: int) -> UInt8[np.ndarray, "*rows bits"]:
    """The low bit of each packed code, packed."""
    return pack_bits(unpack_codes(codes_packed, size) % 2)


def scale_values(scales: UInt8[np.ndarray, "*s"], fmt: BlockFormat) -> Float[np.ndarray, "*s"]:
    """Float64 values of scale bytes; NaN where the byte is not a scale."""
    if fmt.scale == "e8m0":
        return np.where(scales == E8M0_NAN, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    return np.where(scales > 0x7E, np.nan, scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def _float64(x):
    """Exact float64 of x with float32 subnormals set to (signed) zero."""
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaN bit patterns
        return _flushed(np.asarray(x).astype(np.float64))


def _float32(x):
    """x rounded to float32, subnormals set to zero, as float64."""
    return _float64(np.asarray(x).astype(np.float32))


def _less_last_bit(x):
    """x rounded to float32 without its last bit."""
    return (_float32(x).astype(np.float32).view(np.uint32) & 0xFFFFFFFE).view(np.float32).astype(np.float64)


def _flushed(x):
    return np.where(np.abs(x) < _TINY, np.copysign(0.0, x), x)


def _pad(x, length: int):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def _joined(blocks, size: int):
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])[..., :size]


def _blocks(x, fmt: BlockFormat):
    count = fmt.scales_bytes(x.shape[-1])
    return _pad(_float64(x), count * fmt.block).reshape(*x.shape[:-1], count, fmt.block)


def _exponent(multiplier, rows: tuple[int, ...]):
    """n of a decode multiplier, for every row, with two axes for block and value."""
    if multiplier is None:
        return None
    n = np.clip(1 - np.frexp(np.asarray(multiplier, np.float32))[1], -126, 126)
    return np.broadcast_to(n, rows)[..., None, None]


def _scale_bytes(blocks, n, fmt: BlockFormat):
    amax = np.max(np.abs(blocks), axis=-1)
    finite = np.isfinite(amax)
    amax = np.where(finite, amax, 0.0)
    if fmt.scale == "e8m0":
        fraction, exponent = np.frexp(amax)  # 1.75 <= mantissa counts as the next power of two
        power = np.where(fraction >= 0.875, exponent, exponent - 1)
        byte = np.where(amax == 0, 0, np.clip(power - 2 + 127, 0, 254))
        return np.where(finite, byte, E8M0_NAN).astype(np.uint8)
    with np.errstate(over="ignore"):
        wide = (np.ldexp(amax, n[..., 0]) * RECIPROCAL_SIX).astype(np.float32)
    byte = np.minimum(wide, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(finite, byte, E4M3_NAN).astype(np.uint8)


def _normalized(magnitude, scales, n, fmt: BlockFormat):
    """(a, step): the magnitude and the unit it is measured in, float64 and exact.

    NVFP4 measures |x| * 2^n in block scales, MXFP4 |x| * 2^(127 - byte) in ones (byte 254, which no quantizer writes, with
    half the factor in twos); a below 2^-126 counts as zero.
    """
    step = scale_values(scales, fmt)[..., None]
    if fmt.scale == "e8m0":
        power = np.minimum(scales.astype(int), 253)[..., None] - 127
        magnitude, step = np.ldexp(magnitude, -power), step * np.ldexp(1.0, -power)
    else:
        magnitude = np.ldexp(magnitude, n)
    return _flushed(magnitude), step


def _nearest_codes(blocks, scales, n, fmt: BlockFormat):
    a, step = _normalized(np.abs(blocks), scales, n, fmt)
    with np.errstate(invalid="ignore"):
        if fmt.scale == "e8m0":
            scaled = np.minimum(np.where(np.isfinite(step) & np.isfinite(a), a / step, 0.0), 6.0)
            return (scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 7).astype(int)
        count = sum((a > midpoint * step).astype(int) for midpoint in E2M1_MIDPOINTS)
        return np.where(step == 0, 0, count)


def _decoded(magnitude, scales, multiplier, fmt: BlockFormat):
    """Magnitudes after scaling, flushed and rounded to bfloat16, as float64."""
    step = scale_values(scales, fmt)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        if fmt.scale == "e8m0":
            product = (magnitude * step).astype(np.float32)
        else:
            multiplier = np.broadcast_to(np.asarray(multiplier, np.float32), scales.shape[:-1])[..., None, None]
            product = magnitude.astype(np.float32) * _flushed(step.astype(np.float32) * multiplier)
        return _flushed(product).astype(ml_dtypes.bfloat16).astype(np.float64)
