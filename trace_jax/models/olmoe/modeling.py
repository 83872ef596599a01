"""OLMoE: norms over all queries and all keys together, and selected probabilities that are not rescaled by default.

Source: Muennighoff et al., arXiv 2409.02060, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.models import softmax_moe
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.modules import Decoder
from trace_jax.models.olmoe.config import OlmoeConfig


def make(config: OlmoeConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return softmax_moe.make_decoder(config, rngs, norms=config.attention_norms, biases="qkvo" if config.attention_bias else "")


def layer_function(config: OlmoeConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    return softmax_moe.layer_function(config, inputs, norm_topk_prob=config.norm_topk_prob)
