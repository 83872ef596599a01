"""The layer that Qwen3-MoE, OLMoE and Mixtral share: grouped-query attention, then experts behind a softmax router.

They differ in the norms of queries and keys, in biases, and in whether the selected probabilities are rescaled.
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from trace_jax.layers import rope
from trace_jax.layers.router import route
from trace_jax.models.blocks import Choice, normed, routed_experts, router_logits, self_attention
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.decoder_config import MoeConfig
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Decoder, Experts, linear, norm


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: MoeConfig, rngs: nnx.Rngs, *, norms: tuple[int, int] | None, biases: str):
        self.input_norm = norm(config, config.hidden_size)
        self.attention = Attention(config, rngs, norms=norms, biases=biases)
        self.post_attention_norm = norm(config, config.hidden_size)
        self.router = linear(rngs, config.num_experts, config.hidden_size)
        self.experts = Experts(config, rngs)


def make_decoder(config: MoeConfig, rngs: nnx.Rngs, *, norms: tuple[int, int] | None = None, biases: str = "") -> Decoder:
    """The decoder with random parameters; `norms` and `biases` as in `Attention`."""
    return Decoder(config, rngs, lambda kind, keys: Layer(config, keys, norms=norms, biases=biases))


def layer_function(config: MoeConfig, inputs: ForwardInputs, *, norm_topk_prob: bool) -> ApplyLayer:
    """The function of a layer."""
    turns, eps = rope.tables(inputs.positions, config.head_dim, config.rope_theta), config.rms_norm_eps

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        def choose(y: Float[Array, "B T D"]) -> Choice:
            return route(router_logits(y, layer.router), config.experts_per_token, norm_topk_prob, scope.replay)

        x = x + self_attention(layer.attention, config, normed(x, layer.input_norm, eps), scope, turns)
        return x + routed_experts(layer.experts, normed(x, layer.post_attention_norm, eps), scope, choose)

    return apply_layer
