"""The float32 decode multiplier above the block scales of NVFP4."""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.numerics.arithmetic import bits_float, magnitude_bits, multiplier_bits
from rollout_bridge.vllm_plugin.numerics.formats import BlockFormat

Multiplier: TypeAlias = Tensor | np.ndarray | np.floating | float
"""A decode multiplier that broadcasts against the rows; computed in float32."""


def decode_multiplier(amax: Tensor, *, nudged: bool = True) -> Tensor:
    """2^-n for tensors of the given largest magnitude, n the largest integer with amax * 2^n <= 2688.

    Args:
      amax: float, any shape. Zero or not finite gives n = 0.
      nudged: times (1 + 2^-17), for weights and activations; False for K and V.

    Returns:
      float32 of the same shape.
    """
    return bits_float(multiplier_bits(magnitude_bits(amax.to(torch.float32)), nudged))


def resolve_multiplier(x: Tensor, fmt: BlockFormat, multiplier: Multiplier | None) -> Tensor | None:
    """The multiplier a quantizer uses for x: float32, scalar or with one axis for every leading axis of x; None for MXFP4.

    Raises:
      ValueError: a multiplier the format does not have, or one that does not broadcast against the rows.
    """
    if not fmt.has_multiplier:
        if multiplier is not None:
            raise ValueError(f"{fmt.name} has no multiplier; pass multiplier=None")
        return None
    if multiplier is None:
        bits = magnitude_bits(x.to(torch.float32))
        return bits_float(multiplier_bits(bits.max() if bits.numel() else bits.new_zeros(()), True))
    value = torch.as_tensor(multiplier, dtype=torch.float32, device=x.device)
    if value.ndim == 0:
        return value
    rows = x.shape[:-1]
    shape = (1,) * (len(rows) - value.ndim) + tuple(value.shape)
    if len(shape) != len(rows) or any(have not in (1, want) for have, want in zip(shape, rows, strict=True)):
        raise ValueError(
            f"multiplier of shape {tuple(value.shape)} does not broadcast against the rows {tuple(rows)} (all axes but the last)"
        )
    return value.reshape(shape)
