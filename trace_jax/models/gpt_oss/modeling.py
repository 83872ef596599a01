"""gpt-oss: attention with sinks, over a window in every other layer; biases everywhere; experts with a clamped gate.

Source: gpt-oss model card, arXiv 2508.10925, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from trace_jax.layers import rope
from trace_jax.layers.experts import ExpertBiases, clamped_gate
from trace_jax.layers.router import route
from trace_jax.models.blocks import Choice, normed, routed_experts, router_logits, self_attention
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.gpt_oss.config import SLIDING, GptOssConfig
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Decoder, Experts, linear, norm, zeros


class Biases(nnx.Module):
    """Biases of one layer's experts, in BF16 for engines: `gate`, `up` `[E, F]` and `down` `[E, D]`."""

    def __init__(self, config: GptOssConfig):
        self.gate = zeros(config.num_experts, config.expert_hidden_size)
        self.up = zeros(config.num_experts, config.expert_hidden_size)
        self.down = zeros(config.num_experts, config.hidden_size)


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: GptOssConfig, rngs: nnx.Rngs):
        self.input_norm = norm(config, config.hidden_size)
        self.attention = Attention(config, rngs, biases="qkvo", sinks=True)
        self.post_attention_norm = norm(config, config.hidden_size)
        self.router = linear(rngs, config.num_experts, config.hidden_size)
        self.router_bias = zeros(config.num_experts)
        self.experts = Experts(config, rngs)
        self.expert_biases = Biases(config)


def make(config: GptOssConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return Decoder(config, rngs, lambda kind, keys: Layer(config, keys))


def layer_function(config: GptOssConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    turns, eps = rope.tables(inputs.positions, config.head_dim, config.rope_theta, config.rope_scaling), config.rms_norm_eps
    activation = clamped_gate(config.swiglu_alpha, config.swiglu_limit)

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        window = config.sliding_window if kind == SLIDING else None
        x = x + self_attention(layer.attention, config, normed(x, layer.input_norm, eps), scope, turns, window)
        biases = ExpertBiases(*(getattr(layer.expert_biases, name)[...].astype(x.dtype) for name in ExpertBiases._fields))

        def choose(y: Float[Array, "B T D"]) -> Choice:
            bias = layer.router_bias[...].astype(x.dtype).astype(jnp.float32)[None, None]
            return route(router_logits(y, layer.router) + bias, config.experts_per_token, True, scope.replay)

        y = normed(x, layer.post_attention_norm, eps)
        return x + routed_experts(layer.experts, y, scope, choose, activation=activation, biases=biases)

    return apply_layer
