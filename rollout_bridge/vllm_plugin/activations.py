"""The rounded input of a product, with or without QUADS' residual compensation.

A compensated product is one product with longer rows: [Q(x), Q(R[C])] times [W, W[:, C]] transposed (`numerics.residual`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.numerics import BlockFormat, channel_energy, dequantize, fake_quant, quantize, residual_operand
from rollout_bridge.vllm_plugin.observing import observer


@dataclass(frozen=True)
class Rounding:
    """How the input of a product is rounded.

    Args:
      fmt: the format; None leaves the input as it is (W4A16).
      multiplier: float32 scalar of a format that has one.
      channels: int64[c], ascending: channels whose residual is rounded as well; None compensates nothing.
      energy: float64[d], to which the squared residuals of every input are added; None measures nothing.
      site: name and layer under which a capture sees the codes; None shows nothing.
    """

    fmt: BlockFormat | None = None
    multiplier: Tensor | None = None
    channels: Tensor | None = None
    energy: Tensor | None = None
    site: tuple[str, int] | None = None

    def input(self, x: Tensor) -> Tensor:
        """The left operand: x[..., d] as [..., d + c], in the dtype of x."""
        observe = observer() if self.site else None
        if self.fmt is None:
            if observe is not None:
                observe(*self.site, None, x)
            return x
        if self.energy is not None:
            self.energy.add_(channel_energy(x, self.fmt, self.multiplier))
        if observe is None and self.channels is None:
            return fake_quant(x, self.fmt, self.multiplier)
        q = quantize(x, self.fmt, self.multiplier)
        if observe is not None:
            q = observe(*self.site, q, x)
        if self.channels is None:
            return dequantize(q, x.dtype)
        left = residual_operand(x, q, self.channels)
        return torch.cat([dequantize(q, x.dtype), dequantize(left, x.dtype)], dim=-1)

    def weight(self, weight: Tensor) -> Tensor:
        """The right operand for a dequantized weight [n, d], as [n, d + c]."""
        if self.fmt is None or self.channels is None:
            return weight
        return torch.cat([weight, weight.index_select(-1, self.channels)], dim=-1)
