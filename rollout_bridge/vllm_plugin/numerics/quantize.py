"""The canonical quantizer, its inverse, and both in one."""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout_bridge.vllm_plugin.numerics.arithmetic import (
    bits_float,
    decode_factor,
    e2m1_magnitude,
    encode_gain,
    encode_terms,
    magnitude_bits,
    nearest_index,
    scale_code,
    signed_value,
)
from rollout_bridge.vllm_plugin.numerics.formats import BlockFormat
from rollout_bridge.vllm_plugin.numerics.multiplier import Multiplier, resolve_multiplier
from rollout_bridge.vllm_plugin.numerics.packing import pack_codes, unpack_codes

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor in a block format, quantized along its last axis.

    Args:
      codes: uint8[..., ceil(d/2)], two E2M1 codes a byte, low nibble first; never -0.
      scales: uint8[..., ceil(d/block)], E4M3 or E8M0 bytes. 0x7F (E4M3) or 0xFF (E8M0) marks a block that held a value
        that was not finite.
      multiplier: float32 decode multiplier, scalar or with one axis for every leading axis; None for MXFP4.
      size: d, the length of the last axis of the tensor.
      fmt: the format.
    """

    codes: Tensor
    scales: Tensor
    multiplier: Tensor | None
    size: int
    fmt: BlockFormat


def quantize(x: Tensor, fmt: BlockFormat, multiplier: Multiplier | None = None) -> Quantized:
    """Packed FP4 codes and block scales of x along its last axis.

    Args:
      x: bfloat16, float16 or float32[..., d]; computed in float32.
      fmt: NVFP4 or MXFP4.
      multiplier: float32 decode multiplier, finite and > 0, broadcastable against x.shape[:-1]; None takes that of the whole
        tensor (NVFP4), and is the only choice for MXFP4. Only its exponent enters the codes.

    Raises:
      ValueError: wrong dtype, empty last axis, or a multiplier that does not fit.
    """
    multiplier, scales, index, negative = _encode(x, fmt, multiplier)
    # Code 8 would be -0: the sign goes only onto a code above zero.
    codes = _join(torch.where(negative & (index > 0), index + 8, index), x.shape[-1])
    return Quantized(pack_codes(codes), scales[..., 0].to(torch.uint8), multiplier, x.shape[-1], fmt)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of a quantized tensor, [..., d], each exact in bfloat16, in `dtype`."""
    count = q.scales.shape[-1]
    codes = pad(unpack_codes(q.codes, q.size), (0, count * q.fmt.block - q.size))
    codes = codes.reshape(*q.scales.shape, q.fmt.block).to(torch.int32)
    value = _decode(codes & 7, codes >= 8, q.scales[..., None].to(torch.int32), q.multiplier)
    return _join(value, q.size).to(dtype)


def fake_quant(x: Tensor, fmt: BlockFormat, multiplier: Multiplier | None = None) -> Tensor:
    """x rounded to the values of the format, `dequantize(quantize(x), x.dtype)` bit for bit. Arguments, raises: as `quantize`."""
    multiplier, scales, index, negative = _encode(x, fmt, multiplier)
    return _join(_decode(index, negative, scales, multiplier), x.shape[-1]).to(x.dtype)


def _encode(x, fmt, multiplier):
    """(multiplier, scale bytes [..., blocks, 1], codes 0..7 and signs [..., blocks, block])."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"cannot quantize a tensor of shape {tuple(x.shape)}; the last axis is the contraction axis and must not be empty")
    if x.dtype not in _FLOATS:
        raise ValueError(f"cannot quantize {x.dtype}; pass bfloat16, float16 or float32")
    multiplier = resolve_multiplier(x, fmt, multiplier)
    count = -(-x.shape[-1] // fmt.block)
    wide = pad(x.detach().to(torch.float32), (0, count * fmt.block - x.shape[-1]))
    blocks = wide.reshape(*x.shape[:-1], count, fmt.block)
    magnitudes = magnitude_bits(blocks)
    gain = None if multiplier is None else encode_gain(_per_block(multiplier))
    scales = scale_code(magnitudes.amax(dim=-1, keepdim=True), gain)
    gain, step = encode_terms(scales, gain)
    index = nearest_index(bits_float(magnitudes) * gain, step, fmt.scale == "e8m0")
    return multiplier, scales, index, torch.signbit(blocks)


def _decode(index, negative, scales, multiplier):
    factor, pre = decode_factor(scales, None if multiplier is None else _per_block(multiplier))
    return signed_value(e2m1_magnitude(index), negative, factor, pre)


def _per_block(value: Tensor) -> Tensor:
    """A row value with the axes of blocks appended; scalars stay scalars."""
    return value if value.ndim == 0 else value[..., None, None]


def _join(blocks: Tensor, size: int) -> Tensor:
    """The first `size` values of every row of blocks."""
    return blocks.flatten(-2)[..., :size]
