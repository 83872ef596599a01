"""The FP4 quantizers of the numeric contract in torch, bit for bit those of `pallas_kernels`, for a process without jax.

They run eagerly: nothing here may be put through `torch.compile`, which could fold or contract what the contract fixes.
"""

from rollout_bridge.vllm_plugin.numerics.formats import MXFP4, NVFP4, BlockFormat
from rollout_bridge.vllm_plugin.numerics.multiplier import decode_multiplier
from rollout_bridge.vllm_plugin.numerics.packing import mantissa_bits, pack_codes, unpack_codes
from rollout_bridge.vllm_plugin.numerics.quantize import Quantized, dequantize, fake_quant, quantize
from rollout_bridge.vllm_plugin.numerics.residual import (
    channel_energy,
    compensated_product,
    largest_channels,
    residual,
    residual_multiplier,
    residual_operand,
    residual_pair,
)

__all__ = [
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "Quantized",
    "channel_energy",
    "compensated_product",
    "decode_multiplier",
    "dequantize",
    "fake_quant",
    "largest_channels",
    "mantissa_bits",
    "pack_codes",
    "quantize",
    "residual",
    "residual_multiplier",
    "residual_operand",
    "residual_pair",
    "unpack_codes",
]
