"""The parameters of Qwen3-MoE as Flax NNX modules.

They hold float32 masters in the torch layout `[out, in]`, so that the contraction axis is last and the quantization blocks
run along it. `modeling.py` computes with them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trace_jax.layers.experts import ExpertWeights
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig


class Attention(nnx.Module):
    """Projections and per-head norms of one layer's attention."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        width, head = config.hidden_size, config.head_dim
        query, key = config.num_heads * head, config.num_kv_heads * head
        self.q_proj = _linear(rngs, query, width)
        self.k_proj = _linear(rngs, key, width)
        self.v_proj = _linear(rngs, key, width)
        self.o_proj = _linear(rngs, width, query, gain=(2 * config.num_layers) ** -0.5)
        self.q_norm = nnx.Param(jnp.ones(head, jnp.float32))
        self.k_norm = nnx.Param(jnp.ones(head, jnp.float32))
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros(query, jnp.float32))
            self.k_bias = nnx.Param(jnp.zeros(key, jnp.float32))
            self.v_bias = nnx.Param(jnp.zeros(key, jnp.float32))
            self.o_bias = nnx.Param(jnp.zeros(width, jnp.float32))


class Experts(nnx.Module):
    """Weights of one layer's experts: `gate`, `up` `[E, F, D]` and `down` `[E, D, F]`."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        count, hidden, width = config.num_experts, config.expert_hidden_size, config.hidden_size
        self.gate = _linear(rngs, count, hidden, width)
        self.up = _linear(rngs, count, hidden, width)
        self.down = _linear(rngs, count, width, hidden, gain=(2 * config.num_layers) ** -0.5)

    def weights(self) -> ExpertWeights:
        """The masters as a tuple."""
        return ExpertWeights(self.gate[...], self.up[...], self.down[...])


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        self.input_norm = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
        self.attention = Attention(config, rngs)
        self.post_attention_norm = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
        self.router = _linear(rngs, config.num_experts, config.hidden_size)
        self.experts = Experts(config, rngs)


class Table(nnx.Module):
    """A `[V, D]` matrix: the embedding or the output head."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))


class Qwen3Moe(nnx.Module):
    """The decoder; its layers are one group, stacked along the leading axis."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs):
        self.embed = Table(config, rngs)
        stack = nnx.vmap(lambda keys: Layer(config, keys), in_axes=0, out_axes=0)
        self.groups = nnx.List([stack(rngs.split(config.num_layers))])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
        if not config.tie_embeddings:
            self.lm_head = Table(config, rngs)


def _linear(rngs: nnx.Rngs, *shape: int, gain: float = 1.0) -> nnx.Param:
    deviation = gain * shape[-1] ** -0.5
    return nnx.Param(deviation * jax.random.normal(rngs.params(), shape, jnp.float32))
