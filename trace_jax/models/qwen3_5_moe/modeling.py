"""Qwen3.5-MoE: gated delta-nets with gated attention every few layers, experts and a gated shared expert in all of them.

Source: Qwen3.5 and, for the delta-nets, Yang et al., arXiv 2412.06464; the layout of the Hugging Face checkpoints.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import as_stored, keep_rounding
from trace_jax.layers import delta_net, partial_sums, rope
from trace_jax.layers.norm import rms_norm
from trace_jax.layers.router import route
from trace_jax.models.blocks import Choice, as_held, feed_forward, normed, routed_experts, router_logits, self_attention
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Decoder, Experts, Mlp, linear, norm, output_gain, zeros
from trace_jax.models.qwen3_5_moe.config import LINEAR, Qwen35MoeConfig


class DeltaNet(nnx.Module):
    """Projections, convolution, decay and norm of one gated delta-net."""

    def __init__(self, config: Qwen35MoeConfig, rngs: nnx.Rngs):
        width, channels, values = config.hidden_size, config.convolution_channels, config.linear_value_width
        self.qkv_proj = linear(rngs, channels, width)
        self.z_proj = linear(rngs, values, width)
        self.b_proj = linear(rngs, config.linear_value_heads, width)
        self.a_proj = linear(rngs, config.linear_value_heads, width)
        self.conv = linear(rngs, channels, 1, config.convolution_taps)
        self.dt_bias = zeros(config.linear_value_heads)
        self.a_log = zeros(config.linear_value_heads)
        self.norm = nnx.Param(jnp.ones(config.linear_value_dim, jnp.float32))
        self.o_proj = linear(rngs, width, values, gain=output_gain(config))


class Layer(nnx.Module):
    """One decoder layer of a kind."""

    def __init__(self, kind: str, config: Qwen35MoeConfig, rngs: nnx.Rngs):
        self.input_norm = norm(config, config.hidden_size)
        if kind == LINEAR:
            self.delta_net = DeltaNet(config, rngs)
        else:
            self.attention = Attention(config, rngs, norms=(config.head_dim, config.head_dim), gated=True)
        self.post_attention_norm = norm(config, config.hidden_size)
        self.router = linear(rngs, config.num_experts, config.hidden_size)
        self.experts = Experts(config, rngs)
        self.shared_experts = Mlp(config, config.shared_hidden_size, rngs)
        self.shared_gate = linear(rngs, 1, config.hidden_size)


def make(config: Qwen35MoeConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return Decoder(config, rngs, lambda kind, keys: Layer(kind, config, keys))


def layer_function(config: Qwen35MoeConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    turns, eps = rope.tables(inputs.positions, config.rotary_dim, config.rope_theta), config.rms_norm_eps

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        y = normed(x, layer.input_norm, eps, config.NORM_OFFSET)
        if kind == LINEAR:
            x = x + _delta_net(layer.delta_net, config, y, scope)
        else:
            x = x + self_attention(layer.attention, config, y, scope, turns)

        def choose(y: Float[Array, "B T D"]) -> Choice:
            return route(router_logits(y, layer.router), config.experts_per_token, True, scope.replay)

        y = normed(x, layer.post_attention_norm, eps, config.NORM_OFFSET)
        gate = jax.nn.sigmoid(router_logits(y, layer.shared_gate))
        shared = keep_rounding((as_stored(feed_forward(layer.shared_experts, y, scope.options.partial_sums)) * gate).astype(x.dtype))
        return x + (routed_experts(layer.experts, y, scope, choose) + shared)

    return apply_layer


def _delta_net(net: DeltaNet, config: Qwen35MoeConfig, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
    """What a gated delta-net adds to the residual stream; nothing of it is quantized."""
    (batch, tokens, _), positions = x.shape, scope.inputs.positions
    counting = jnp.ones(x.shape[:2], bool) if scope.inputs.counting is None else scope.inputs.counting
    heads, key_dim, value_dim, before, channels = config.recurrent_shape
    state, earlier = scope.recurrent() or (
        jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32),
        jnp.zeros((batch, before, channels), x.dtype),
    )

    def project(weight: nnx.Param) -> Float[Array, "B T rows"]:
        return x @ weight[...].astype(x.dtype).T

    mixed = project(net.qkv_proj)
    convolved = delta_net.causal_convolution(mixed, as_held(net.conv, x.dtype)[:, 0], earlier, positions)
    keys = config.linear_key_heads * key_dim
    query, key, value = jnp.split(convolved, [keys, 2 * keys], axis=-1)

    def of_value_heads(y: Float[Array, "B T rows"]) -> Float[Array, "B T heads key"]:
        unit = delta_net.unit_length(y.reshape(batch, tokens, -1, key_dim))
        return jnp.repeat(unit, heads // config.linear_key_heads, axis=2)

    rate = jax.nn.softplus(as_stored(project(net.a_proj)) + as_held(net.dt_bias, x.dtype)[None, None])
    read, state = delta_net.gated_delta_rule(
        of_value_heads(query) * key_dim**-0.5,
        of_value_heads(key),
        as_stored(value).reshape(batch, tokens, heads, value_dim),
        -jnp.exp(as_held(net.a_log, x.dtype))[None, None] * rate,
        jax.nn.sigmoid(as_stored(project(net.b_proj))),
        state,
        positions,
        counting,
    )
    scope.keep_recurrent(state, delta_net.last_inputs(mixed, earlier, counting))
    gate = jax.nn.silu(as_stored(project(net.z_proj))).reshape(read.shape)
    scaled = rms_norm(keep_rounding(read.astype(x.dtype)), as_held(net.norm, x.dtype), config.rms_norm_eps)
    gated = keep_rounding((as_stored(scaled) * gate).astype(x.dtype)).reshape(batch, tokens, -1)
    return partial_sums.matmul(gated, net.o_proj[...].astype(x.dtype).T, scope.options.partial_sums)
