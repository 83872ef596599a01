"""The router of vLLM 0.26, whose Qwen3-MoE has a plain linear layer where 0.32 has `GateLinear`. Imports vllm."""

from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from rollout_bridge.vllm_plugin.reference_layers import router_logits


@PluggableLayer.register_oot(name="ReplicatedLinear")
class ReferenceReplicatedLinear(ReplicatedLinear):
    """vLLM's own layer, with the logits of routers in float32."""

    def forward(self, x):
        """The output, for routers logits [tokens, experts] in float32."""
        if self.prefix.endswith(".mlp.gate") and isinstance(self.quant_method, UnquantizedLinearMethod):
            return router_logits(self, x)
        return super().forward(x)
