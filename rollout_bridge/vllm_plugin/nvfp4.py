"""NVFP4 where the hardware has none: linears and routed experts of ModelOpt checkpoints, emulated with the canonical numerics.

The tensors, their names and their loading stay vLLM's own. Nothing is derived from them when they are loaded, so weights that are
updated in place are used at the next step. Imports vllm: only `plugin.register` imports this module.
"""

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from rollout_bridge.vllm_plugin.emulated_experts import EmulatedExperts
from rollout_bridge.vllm_plugin.kv_cache import CanonicalKVCacheMethod
from rollout_bridge.vllm_plugin.linear import CanonicalNvFp4LinearKernel
from rollout_bridge.vllm_plugin.numerics import NVFP4


class CanonicalModelOptNvFp4FusedMoE(EmulatedExperts, ModelOptNvFp4FusedMoE):
    """Routed experts, W4A4 or, for checkpoints without activation scales, W4A16. vLLM's loader looks for "ModelOpt" in the name."""

    def __init__(self, quant_config, moe_config) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)  # not the parent's, which looks for a kernel
        self.quant_config = quant_config
        self.choose(NVFP4, quant_config.quant_method == "W4A16_NVFP4")
        self.per_token_activation = False
        self.use_global_sf = False

    def get_fused_moe_quant_config(self, layer):
        """None: there is no kernel that would want one."""
        return None

    def process_weights_after_loading(self, layer) -> None:
        """Refuses what would give wrong values silently.

        Raises:
          ValueError: gate and up of an expert with different multipliers, or a scale that is missing or not positive and finite.
          NotImplementedError: as `require_simple`.
        """
        self.require_simple(layer)
        if not torch.equal(layer.w13_weight_scale_2[:, 0], layer.w13_weight_scale_2[:, 1]):
            raise ValueError(f"{layer.layer_name}: gate and up have different weight_scale_2; export with trace-jax, which shares them")
        names = ["w13_weight_scale_2", "w2_weight_scale_2"]
        for name in names if self.use_a16 else [*names, "w13_input_scale", "w2_input_scale"]:
            value = getattr(layer, name)
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ValueError(f"{layer.layer_name}: {name} is missing or not positive for some expert; export every expert's scales")

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """The routed experts' sum for x[N, D]; shared experts are vLLM's own affair."""
        gate_up = self.packed(layer.w13_weight, layer.w13_weight_scale, layer.w13_weight_scale_2[:, 0])
        down = self.packed(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2)
        # One scale for all experts of a layer, as vLLM's own emulation takes it.
        multipliers = (None, None) if self.use_a16 else (layer.w13_input_scale.max(), layer.w2_input_scale.max())
        return self.emulate(layer, x, (topk_ids, topk_weights), gate_up, down, multipliers)


class CanonicalModelOptNvFp4Config(ModelOptNvFp4Config):
    """ModelOpt's NVFP4 configuration with the experts above, and K and V rounded as the settings say."""

    FusedMoEMethodCls = CanonicalModelOptNvFp4FusedMoE
    KVCacheMethodCls = CanonicalKVCacheMethod

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The emulation computes in any of them; float32 is for comparisons with the trainer."""
        return [torch.bfloat16, torch.half, torch.float32]

    def get_quant_method(self, layer, prefix: str):
        """As the parent's, but an unquantized head keeps its weight as it is, which float32 logits need (`reference_layers`)."""
        if isinstance(layer, ParallelLMHead) and self.is_layer_excluded(prefix):
            return UnquantizedEmbeddingMethod()
        return super().get_quant_method(layer, prefix)


def use_canonical_linears() -> None:
    """Makes the kernel above the one of all NVFP4 linears. For W4A16 ones vLLM 0.32 asks a closed list of kernels and 0.26 names one."""
    if hasattr(modelopt, "select_linear_kernel"):  # 0.32
        original = modelopt.select_linear_kernel

        def select(spec, layer, rt, weight_shape=None):
            if spec.weight.dtype == modelopt.FP4_DTYPE:
                return CanonicalNvFp4LinearKernel(NvFp4LinearLayerConfig())
            return original(spec, layer, rt, weight_shape)

        modelopt.select_linear_kernel = select
    else:
        modelopt.init_nvfp4_linear_kernel = lambda: CanonicalNvFp4LinearKernel(NvFp4LinearLayerConfig())
        modelopt.MarlinNvFp4LinearKernel = CanonicalNvFp4LinearKernel
