"""Qwen3-MoE: grouped-query attention with norms per head, then experts behind a softmax router in every layer.

Source: Qwen3 technical report, arXiv 2505.09388, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from trace_jax.layers import rope
from trace_jax.layers.router import route
from trace_jax.models.blocks import normed, routed_experts, router_logits, self_attention
from trace_jax.models.decoder import run_decoder
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Decoder, Experts, linear, ones
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        self.input_norm = ones(config.hidden_size)
        biases = "qkvo" if config.attention_bias else ""
        self.attention = Attention(config, rngs, norms=(config.head_dim, config.head_dim), biases=biases)
        self.post_attention_norm = ones(config.hidden_size)
        self.router = linear(rngs, config.num_experts, config.hidden_size)
        self.experts = Experts(config, rngs)


def make(config: Qwen3MoeConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return Decoder(config, rngs, lambda kind, keys: Layer(config, keys))


def forward(model: Decoder, config: Qwen3MoeConfig, inputs: ForwardInputs, options: ForwardOptions) -> ForwardOutput:
    """Runs the decoder; see `run_decoder`."""
    turns = rope.tables(inputs.positions, config.head_dim, config.rope_theta)

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        x = x + self_attention(layer.attention, config, normed(x, layer.input_norm, config.rms_norm_eps), scope, turns)

        def choose(y: Float[Array, "B T D"]):
            return route(router_logits(y, layer.router), config.experts_per_token, config.norm_topk_prob, scope.replay)

        return x + routed_experts(layer.experts, normed(x, layer.post_attention_norm, config.rms_norm_eps), scope, choose)

    return run_decoder(model, config, inputs, options, apply_layer)
