"""NVFP4 in vLLM on CPU, where vLLM has none: linears and routed experts of ModelOpt checkpoints, emulated with the canonical numerics.

The tensors, their names and their loading stay vLLM's own. Nothing is derived from them when they are loaded, so weights that are
updated in place are used at the next step. Imports vllm: only `plugin.register` imports this module.
"""

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE
from vllm.model_executor.models.utils import extract_layer_index

from rollout_bridge.vllm_plugin.capture import hooks
from rollout_bridge.vllm_plugin.experts import apply_experts
from rollout_bridge.vllm_plugin.numerics import NVFP4, Quantized, dequantize, fake_quant, quantize


@torch.library.custom_op("trace_jax::w4a4_linear", mutates_args=())
def w4a4_linear(x: Tensor, weight: Tensor, scales: Tensor, multiplier: Tensor, input_multiplier: Tensor) -> Tensor:
    """x[..., K] and the packed weight [N, K/2], both dequantized, as a product. An operator of its own, which no compiler looks into."""
    packed = Quantized(weight, scales.view(torch.uint8), multiplier, x.shape[-1], NVFP4)
    return fake_quant(x, NVFP4, input_multiplier) @ dequantize(packed, x.dtype).T


@w4a4_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, multiplier: Tensor, input_multiplier: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class CanonicalNvFp4LinearKernel(EmulationNvFp4LinearKernel):
    """W4A4 linears: static activation scale, both operands dequantized to the model's dtype."""

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the layer's weight, plus the bias."""
        out = w4a4_linear(x, layer.weight, layer.weight_scale, layer.weight_global_scale, layer.input_global_scale)
        return out if bias is None else out + bias


class CanonicalModelOptNvFp4FusedMoE(ModelOptNvFp4FusedMoE):
    """Routed experts, W4A4 or, for checkpoints without activation scales, W4A16. vLLM's loader looks for "ModelOpt" in the name."""

    def __init__(self, quant_config, moe_config) -> None:
        # Not the parent's: it looks for a kernel, and there is none for CPU.
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config
        self.use_a16 = quant_config.quant_method == "W4A16_NVFP4"
        self.per_token_activation = False
        self.use_global_sf = False

    def get_fused_moe_quant_config(self, layer):
        """None: there is no kernel that would want one."""
        return None

    def process_weights_after_loading(self, layer) -> None:
        """Refuses what would give wrong values silently.

        Raises:
          ValueError: gate and up of an expert with different multipliers, or a scale that is missing or not positive and finite.
          NotImplementedError: experts divided between workers, or another activation than silu.
        """
        activation = getattr(layer.activation, "value", layer.activation)
        if layer.expert_map is not None or activation != "silu":
            raise NotImplementedError(
                f"emulated NVFP4 experts with activation {activation!r} or expert parallelism; serve silu experts on one worker"
            )
        if not torch.equal(layer.w13_weight_scale_2[:, 0], layer.w13_weight_scale_2[:, 1]):
            raise ValueError(f"{layer.layer_name}: gate and up have different weight_scale_2; export with trace-jax, which shares them")
        names = ["w13_weight_scale_2", "w2_weight_scale_2"]
        for name in names if self.use_a16 else [*names, "w13_input_scale", "w2_input_scale"]:
            value = getattr(layer, name)
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ValueError(f"{layer.layer_name}: {name} is missing or not positive for some expert; export every expert's scales")

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """The routed experts' sum for x[N, D]; shared experts are vLLM's own affair."""

        def packed(name: str, multiplier: Tensor) -> Quantized:
            codes, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            return Quantized(codes, scales.view(torch.uint8), multiplier[:, None], 2 * codes.shape[-1], NVFP4)

        # One scale for all experts of a layer, as vLLM's own emulation takes it.
        inputs = (None, None) if self.use_a16 else (layer.w13_input_scale.max(), layer.w2_input_scale.max())
        gate_up, down = packed("w13", layer.w13_weight_scale_2[:, 0]), packed("w2", layer.w2_weight_scale_2)
        if inputs[0] is not None and hooks.active():
            own = quantize(x, NVFP4, inputs[0])
            quantized = hooks.observe("expert_input", extract_layer_index(layer.layer_name), own, x)
            x, inputs = dequantize(quantized, x.dtype), (None, inputs[1])
        return apply_experts(x, topk_ids, topk_weights, gate_up, down, *inputs)


class CanonicalModelOptNvFp4Config(ModelOptNvFp4Config):
    """ModelOpt's NVFP4 configuration with the experts above."""

    FusedMoEMethodCls = CanonicalModelOptNvFp4FusedMoE

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The emulation computes in any of them; float32 is for comparisons with the trainer."""
        return [torch.bfloat16, torch.half, torch.float32]
