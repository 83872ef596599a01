"""DeepSeek-V3: multi-head latent attention, dense first layers, a biased sigmoid router over groups of experts, shared experts.

The latent vectors and the rotated part of the keys are what the cache holds, in the compute dtype; keys and values are multiplied from
them whenever they are attended to.

Source: DeepSeek-V3 technical report, arXiv 2412.19437, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import keep_rounding, rotate
from trace_jax.layers import partial_sums, rope
from trace_jax.layers.attention import attend
from trace_jax.models import biased_moe
from trace_jax.models.blocks import normed
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.deepseek_v3.config import DeepseekV3Config
from trace_jax.models.hf_rope import mscale
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Decoder, linear, norm, output_gain

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which the checkpoints do not state."""


class LatentAttention(nnx.Module):
    """Projections of one layer's attention."""

    def __init__(self, config: DeepseekV3Config, rngs: nnx.Rngs):
        width, heads = config.hidden_size, config.num_heads
        if config.query_rank:
            self.q_a_proj = linear(rngs, config.query_rank, width)
            self.q_a_norm = norm(config, config.query_rank)
            self.q_b_proj = linear(rngs, heads * config.head_dim, config.query_rank)
        else:
            self.q_proj = linear(rngs, heads * config.head_dim, width)
        self.kv_a_proj = linear(rngs, config.latent_rank + config.rotary_dim, width)
        self.kv_a_norm = norm(config, config.latent_rank)
        self.kv_b_proj = linear(rngs, heads * (config.plain_dim + config.value_dim), config.latent_rank)
        self.o_proj = linear(rngs, width, heads * config.value_dim, gain=output_gain(config))


def make(config: DeepseekV3Config, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return Decoder(config, rngs, lambda kind, keys: biased_moe.Layer(kind, config, keys, LatentAttention(config, keys)))


def layer_function(config: DeepseekV3Config, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    turns = rope.tables(inputs.positions, config.rotary_dim, config.rope_theta, config.rope_scaling)
    return biased_moe.layer_function(config, lambda module, x, scope: _latent_attention(module, config, x, scope, turns))


def _latent_attention(
    attention: LatentAttention, config: DeepseekV3Config, x: Float[Array, "B T D"], scope: LayerScope, turns: rope.Tables
) -> Float[Array, "B T D"]:
    batch, tokens, _ = x.shape

    def project(y: Float[Array, "B T _"], name: str) -> Float[Array, "B T _"]:
        return y @ getattr(attention, name)[...].astype(x.dtype).T

    def turned(y: Float[Array, "B T heads rotary"]) -> Float[Array, "B T heads rotary"]:
        return rotate(jnp.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1) if config.interleaved else y, *turns)

    if config.query_rank:
        query = project(normed(project(x, "q_a_proj"), attention.q_a_norm, LATENT_EPS), "q_b_proj")
    else:
        query = project(x, "q_proj")
    query = query.reshape(batch, tokens, config.num_heads, config.head_dim)
    query = jnp.concatenate([query[..., : config.plain_dim], turned(query[..., config.plain_dim :])], axis=-1)

    latent, rotary = jnp.split(project(x, "kv_a_proj"), [config.latent_rank], axis=-1)
    latent = keep_rounding(normed(latent, attention.kv_a_norm, LATENT_EPS))
    latents, rotaries = scope.through_cache(latent[:, :, None], turned(rotary[:, :, None]), x.dtype)
    expanded = project(latents[:, :, 0], "kv_b_proj").reshape(batch, latents.shape[1], config.num_heads, -1)
    plain, value = jnp.split(expanded, [config.plain_dim], axis=-1)
    key = jnp.concatenate([plain, jnp.broadcast_to(rotaries, (*plain.shape[:-1], config.rotary_dim))], axis=-1)
    attended = attend(query, key, value, scope.inputs.mask, scale=_score_scale(config))
    weight = attention.o_proj[...].astype(x.dtype).T
    return partial_sums.matmul(attended.reshape(batch, tokens, -1), weight, scope.options.partial_sums)


def _score_scale(config: DeepseekV3Config) -> float:
    scale = config.head_dim**-0.5
    if config.rope_scaling is None or not config.mscale_all_dim:
        return scale
    return scale * mscale(config.rope_scaling.factor, config.mscale_all_dim) ** 2
