"""MXFP4 experts of compressed-tensors checkpoints on CPU, emulated with the canonical numerics: W4A4, or W4A16 by the checkpoint.

vLLM has no kernel for them there, and on GPUs before Blackwell one that leaves activations unrounded. Imports vllm.
"""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4 import (
    CompressedTensorsW4A4Mxfp4MoEMethod,
)

from rollout_bridge.vllm_plugin.emulated_experts import EmulatedExperts
from rollout_bridge.vllm_plugin.numerics import MXFP4


class CanonicalMxfp4FusedMoE(EmulatedExperts, CompressedTensorsW4A4Mxfp4MoEMethod):
    """Routed experts with E8M0 block scales and no multipliers."""

    supports_eplb = False

    def __init__(self, moe_config, use_a16: bool) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)  # not the parent's, which looks for a kernel
        self.group_size = MXFP4.block
        self.choose(MXFP4, use_a16)

    def get_fused_moe_quant_config(self, layer):
        """None: there is no kernel that would want one."""
        return None

    def process_weights_after_loading(self, layer) -> None:
        """Leaves the tensors as they were loaded. Raises: as `require_simple`."""
        self.require_simple(layer)

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """The routed experts' sum for x[N, D]; shared experts are vLLM's own affair."""
        gate_up = self.packed(layer.w13_weight_packed, layer.w13_weight_scale, None)
        down = self.packed(layer.w2_weight_packed, layer.w2_weight_scale, None)
        return self.emulate(layer, x, (topk_ids, topk_weights), gate_up, down, (None, None))


class CanonicalCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration with the experts above for MXFP4 weights."""

    def get_supported_act_dtypes(self):
        """The emulation also computes in float32, for comparisons with the trainer."""
        import torch

        return [*super().get_supported_act_dtypes(), torch.float32]

    def get_quant_method(self, layer, prefix: str):
        """As the parent's, but for MXFP4 experts."""
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            scheme = self.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_gate_proj_name}")
            if scheme is not None and self._is_mxfp4(scheme["weights"]):
                return CanonicalMxfp4FusedMoE(layer.moe_config, scheme.get("input_activations") is None)
        return super().get_quant_method(layer, prefix)
