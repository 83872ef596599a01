"""Llama 2, 3 and their relatives: grouped-query attention without norms, frequencies of Llama 3 where the checkpoint has them.

Source: Touvron et al., arXiv 2302.13971; the Llama 3 herd, arXiv 2407.21783, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.layers import rope
from trace_jax.models import dense
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.llama.config import LlamaConfig
from trace_jax.models.modules import Decoder


def make(config: LlamaConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    biases = "qkvo" if config.attention_bias else ""
    return dense.make_decoder(config, config.ffn_hidden_size, rngs, biases=biases)


def layer_function(config: LlamaConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    return dense.layer_function(config, rope.tables(inputs.positions, config.head_dim, config.rope_theta, config.rope_scaling))
