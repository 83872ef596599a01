"""GLM-4.5: grouped-query attention that rotates a part of every head, dense first layers, a biased sigmoid router, shared experts.

Source: GLM-4.5, arXiv 2508.06471, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.layers import rope
from trace_jax.models import biased_moe
from trace_jax.models.blocks import self_attention
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.glm4_moe.config import Glm4MoeConfig
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.modules import Attention, Decoder


def make(config: Glm4MoeConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""

    def layer(kind: str, keys: nnx.Rngs) -> nnx.Module:
        return biased_moe.Layer(kind, config, keys, Attention(config, keys, norms=config.norms, biases=config.biases))

    return Decoder(config, rngs, layer)


def layer_function(config: Glm4MoeConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    turns = rope.tables(inputs.positions, config.rotary_dim, config.rope_theta)
    return biased_moe.layer_function(config, lambda module, x, scope: self_attention(module, config, x, scope, turns))
