"""Linears of ModelOpt's NVFP4 checkpoints on CPU, emulated with the canonical numerics. Imports vllm."""

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel

from rollout_bridge.vllm_plugin.activations import Rounding
from rollout_bridge.vllm_plugin.channels import Channels
from rollout_bridge.vllm_plugin.numerics import NVFP4, Quantized, dequantize
from rollout_bridge.vllm_plugin.settings import current_settings


@torch.library.custom_op("trace_jax::nvfp4_linear", mutates_args=())
def nvfp4_linear(
    x: Tensor, weight: Tensor, scales: Tensor, multiplier: Tensor, input_multiplier: Tensor | None, channels: Tensor | None
) -> Tensor:
    """x[..., K], rounded unless input_multiplier is None, times the packed weight [N, K/2]. An operator which no compiler looks into."""
    packed = Quantized(weight, scales.view(torch.uint8), multiplier, x.shape[-1], NVFP4)
    rounding = Rounding(None if input_multiplier is None else NVFP4, input_multiplier, channels)
    return rounding.input(x) @ rounding.weight(dequantize(packed, x.dtype)).T


@nvfp4_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, multiplier: Tensor, input_multiplier: Tensor | None, channels: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class CanonicalNvFp4LinearKernel(EmulationNvFp4LinearKernel):
    """W4A4 linears with a static activation scale, or W4A16 ones; both operands dequantized to the model's dtype."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.channels = {"input": Channels(current_settings().residual_fraction)}

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the layer's weight, plus the bias."""
        multiplier = getattr(layer, "input_global_scale", None)  # W4A16 has none
        fmt = None if multiplier is None else NVFP4
        rounding = self.channels["input"].rounding(x.shape[-1], x.device, fmt, multiplier)
        if rounding.energy is not None:
            rounding.input(x)
        out = nvfp4_linear(x, layer.weight, layer.weight_scale, layer.weight_global_scale, multiplier, rounding.channels)
        return out if bias is None else out + bias
