"""Residual activation compensation (QUADS, arXiv 2607.15810): what the quantizer left over, quantized once more for some channels.

    Y = Q(X) Q(W)^T + Q(R[:, C]) Q(W)[:, C]^T,   R = X - Q(X)

The channels C and the residual's multiplier are fixed before the run, like every activation scale here: a choice made for each
batch would make a token's output depend on its neighbours.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.numerics.arithmetic import SMALLEST_NORMAL
from rollout_bridge.vllm_plugin.numerics.formats import BlockFormat
from rollout_bridge.vllm_plugin.numerics.multiplier import Multiplier
from rollout_bridge.vllm_plugin.numerics.quantize import Quantized, dequantize, quantize


def residual(x: Tensor, q: Quantized) -> Tensor:
    """x - Q(x), [..., d], in the dtype of x: exact for bfloat16 under a power of two, nudged or not."""
    return (x.to(torch.float32) - dequantize(q, torch.float32)).to(x.dtype)


def residual_multiplier(multiplier: Tensor) -> Tensor:
    """A decode multiplier for residuals that needs no calibration: a fourth of the activation's.

    A rounding error is at most one block scale, and the largest one, 448 of its multiplier, is well inside 2688 / 4.
    What static activation scales clip comes back clipped here too.
    """
    return (multiplier / 4).clamp(min=SMALLEST_NORMAL)


def residual_pair(x: Tensor, fmt: BlockFormat, multiplier: Multiplier | None, channels: Tensor) -> tuple[Quantized, Quantized]:
    """(Q(x), Q(R[..., channels])): the two operands of the compensated product.

    Args:
      x: bfloat16, float16 or float32[..., d].
      fmt: NVFP4 or MXFP4.
      multiplier: float32 decode multiplier of x, scalar or one a row; None for MXFP4.
      channels: int64[c], ascending (`largest_channels`). Blocks of the second operand run along this axis.

    Raises:
      ValueError: as `quantize`; a multiplier is not optional for NVFP4, where a dynamic one would depend on the batch.
    """
    if fmt.has_multiplier and multiplier is None:
        raise ValueError(f"{fmt.name} needs a static multiplier for compensated activations; pass the calibrated one")
    q = quantize(x, fmt, multiplier)
    return q, residual_operand(x, q, channels)


def residual_operand(x: Tensor, q: Quantized, channels: Tensor) -> Quantized:
    """Q(R[..., channels]) of x and its rounding, in the same format; see `residual_pair`."""
    multiplier = None if q.multiplier is None else residual_multiplier(q.multiplier)
    return quantize(residual(x, q).index_select(-1, channels), q.fmt, multiplier)


def compensated_product(pair: tuple[Quantized, Quantized], weight: Tensor, channels: Tensor) -> Tensor:
    """Y[..., n] in the dtype of the weight, both products summed before it.

    Args:
      pair: `residual_pair` of the activations.
      weight: the dequantized Q(W), [n, d].
      channels: the channels of the pair.
    """
    main, extra = (dequantize(q, weight.dtype) for q in pair)
    return torch.cat([main, extra], dim=-1) @ torch.cat([weight, weight.index_select(-1, channels)], dim=-1).T


def channel_energy(x: Tensor, fmt: BlockFormat, multiplier: Multiplier | None) -> Tensor:
    """Sum over all rows of the squared residual, float64[d]: added up over calibration prompts, it ranks the channels."""
    error = residual(x, quantize(x, fmt, multiplier)).to(torch.float64)
    return error.square().reshape(-1, x.shape[-1]).sum(dim=0)


def largest_channels(energy: Tensor, fraction: float, fmt: BlockFormat) -> Tensor:
    """The channels with the largest residual in L2: int64[c], ascending.

    Args:
      energy: float64[d], `channel_energy` over calibration data.
      fraction: share of the channels, 0 to 1; rounded up to whole blocks.
      fmt: the format, for the length of a block.

    Raises:
      ValueError: a fraction outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"residual_compensation.fraction is {fraction}; write a number from 0 to 1")
    size = energy.shape[0]
    count = min(size, math.ceil(Fraction(str(fraction)) * size / fmt.block) * fmt.block)
    order = torch.sort(energy, descending=True, stable=True).indices
    return order[:count].sort().values
