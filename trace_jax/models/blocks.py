"""The two halves of a decoder layer as functions over its parameters: attention, and the feed-forward network, routed or dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import as_stored, keep_rounding, round_to_bf16
from trace_jax.layers import partial_sums
from trace_jax.layers.attention import attend
from trace_jax.layers.experts import ExpertWeights, apply_experts, silu_gate
from trace_jax.layers.norm import rms_norm
from trace_jax.layers.rope import Tables, rotate_part
from trace_jax.models.decoder_config import DecoderConfig
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Experts, Mlp
from trace_jax.quantization.weights import fake_quant_experts

Choice = tuple[Int[Array, "B T k"], Float[Array, "B T k"], Int[Array, "B T k"]]
"""Experts used, their mixing weights, and the router's own choice."""


def normed(x: Float[Array, "*rows D"], weight: nnx.Param, eps: float, offset: float = 0.0) -> Float[Array, "*rows D"]:
    """RMS norm with the weight as an engine holds it, plus `offset`."""
    scale = as_held(weight, x.dtype)
    return rms_norm(x, scale + offset if offset else scale, eps)


def as_held(weight: nnx.Param, dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """A parameter that is computed with in float32, as an engine of this compute dtype holds it.

    An engine holds it in BF16. A cast to BF16 and back could be folded away by XLA on GPU, so the master is rounded arithmetically.
    """
    value = weight[...]
    return round_to_bf16(value) if dtype == jnp.bfloat16 and value.dtype == jnp.float32 else value


def self_attention(
    attention: Attention, config: DecoderConfig, x: Float[Array, "B T D"], scope: LayerScope, turns: Tables, window: int | None = None
) -> Float[Array, "B T D"]:
    """Grouped-query attention over rounded keys and values (after RoPE; the newest included); what it adds to the residual stream.

    Norms of queries and keys, biases, sinks and gates act where the module has them.

    Args:
      attention: module of the layer.
      x: input after the norm.
      turns: rotary tables; heads that are wider than they keep their last entries.
      window: how many tokens a query sees, itself included; None for all.
    """

    def project(name: str) -> Float[Array, "B T rows"]:
        y = x @ getattr(attention, f"{name}_proj")[...].astype(x.dtype).T
        if hasattr(attention, f"{name}_bias"):
            y = y + getattr(attention, f"{name}_bias")[...].astype(x.dtype)[None, None, :]
        return y

    def in_heads(y: Float[Array, "B T rows"], name: str = "") -> Float[Array, "B T heads head_dim"]:
        if hasattr(attention, f"{name}_norm"):
            weight = getattr(attention, f"{name}_norm")
            y = normed(y.reshape(*y.shape[:2], -1, weight.shape[-1]), weight, config.rms_norm_eps, config.NORM_OFFSET)
        return y.reshape(*y.shape[:2], -1, config.head_dim)

    query, gate = project("q"), None
    if query.shape[-1] == 2 * config.num_heads * config.head_dim:
        query, gate = (part.reshape(*x.shape[:2], -1) for part in jnp.split(query.reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1))
    query, key = rotate_part(in_heads(query, "q"), turns), rotate_part(in_heads(project("k"), "k"), turns)
    value = in_heads(project("v"))
    rounded_key, rounded_value = scope.round("k", key, lead=1), scope.round("v", value, lead=1)
    rounded_key, rounded_value = scope.through_cache(rounded_key, rounded_value, x.dtype)
    mask = scope.inputs.mask
    if window is not None:
        mask = mask & (scope.inputs.positions[:, :, None] - scope.key_positions()[:, None, :] < window)
    sinks = attention.sinks[...] if hasattr(attention, "sinks") else None
    attended = attend(query, rounded_key, rounded_value, mask, sinks=sinks)
    attended, parts = attended.reshape(*x.shape[:2], -1), scope.options.partial_sums
    if gate is not None:
        attended = keep_rounding((as_stored(attended) * jax.nn.sigmoid(as_stored(gate))).astype(x.dtype))
    update = partial_sums.matmul(attended, attention.o_proj[...].astype(x.dtype).T, parts)
    if hasattr(attention, "o_bias"):
        update = keep_rounding(update + attention.o_bias[...].astype(x.dtype)[None, None, :])
    return update


def routed_experts(
    experts: Experts, x: Float[Array, "B T D"], scope: LayerScope, choose: Callable[[Float[Array, "B T D"]], Choice], **kinds: Any
) -> Float[Array, "B T D"]:
    """The routed experts: choose, round the input once per token, fake-quantize the weights, round the input of the down projection.

    Args:
      experts: module of the layer.
      x: input after the norm.
      choose: the router, over that input.
      kinds: further arguments of `apply_experts`.
    """
    if scope.options.observe == "residual":  # zeros leave no residual, neither here nor, through their products, at the down projection
        x = jnp.where(jnp.any(scope.inputs.mask, axis=-1, keepdims=True), x, jnp.zeros_like(x))
    ids, mixing, own = choose(x)
    scope.reports["routes"] = {"used": ids, "own": own}
    rounded = scope.round("expert_input", x, lead=0)
    weights = fake_quant_experts(experts.weights(), scope.options.plan.weights)
    k = ids.shape[-1]
    update = apply_experts(
        rounded.reshape(-1, rounded.shape[-1]),
        ids.reshape(-1, k),
        mixing.reshape(-1, k),
        ExpertWeights(*(w.astype(x.dtype) for w in weights)),
        scope.round_hidden,
        scope.options.experts_implementation,
        scope.options.partial_sums,
        **kinds,
    )
    return update.reshape(x.shape)


def router_logits(x: Float[Array, "B T D"], router: nnx.Param) -> Float[Array, "B T E"]:
    """Scores of the experts in float32."""
    return jnp.matmul(x, router[...].astype(x.dtype).T, preferred_element_type=jnp.float32)


def feed_forward(mlp: Mlp, x: Float[Array, "B T D"], parts: int) -> Float[Array, "B T D"]:
    """A dense gated network in the compute dtype, nothing of it quantized; summed in `parts` shares."""
    gate, up = (x @ w[...].astype(x.dtype).T for w in (mlp.gate, mlp.up))
    return partial_sums.matmul(silu_gate(gate, up), mlp.down[...].astype(x.dtype).T, parts)
