"""Qwen3-MoE: grouped-query attention with norms per head, then experts behind a softmax router in every layer.

Source: Qwen3 technical report, arXiv 2505.09388, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.models import softmax_moe
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.modules import Decoder
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig


def make(config: Qwen3MoeConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return softmax_moe.make_decoder(config, rngs, norms=(config.head_dim, config.head_dim), biases="qkvo" if config.attention_bias else "")


def layer_function(config: Qwen3MoeConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    return softmax_moe.layer_function(config, inputs, norm_topk_prob=config.norm_topk_prob)
