"""Mixtral: grouped-query attention without norms, and selected probabilities that sum to one.

Source: Jiang et al., arXiv 2401.04088, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.models import softmax_moe
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.mixtral.config import MixtralConfig
from trace_jax.models.modules import Decoder


def make(config: MixtralConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return softmax_moe.make_decoder(config, rngs)


def layer_function(config: MixtralConfig, inputs: ForwardInputs) -> ApplyLayer:
    """The function of a layer over these inputs; see `run_decoder`."""
    return softmax_moe.layer_function(config, inputs, norm_topk_prob=True)
