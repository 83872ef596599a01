"""Dense Qwen3: grouped-query attention with norms per head.

Source: Qwen3 technical report, arXiv 2505.09388, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.layers import rope
from trace_jax.models import dense
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.modules import Decoder
from trace_jax.models.qwen3.config import Qwen3Config


def make(config: Qwen3Config, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    biases = "qkvo" if config.attention_bias else ""
    return dense.make_decoder(config, config.ffn_hidden_size, rngs, norms=(config.head_dim, config.head_dim), biases=biases)


def layer_function(config: Qwen3Config, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    return dense.layer_function(config, rope.tables(inputs.positions, config.head_dim, config.rope_theta))
