"""Mixtral: grouped-query attention without norms, and selected probabilities that sum to one.

Source: Jiang et al., arXiv 2401.04088, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from flax import nnx

from trace_jax.models import softmax_moe
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput
from trace_jax.models.mixtral.config import MixtralConfig
from trace_jax.models.modules import Decoder


def make(config: MixtralConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with random parameters."""
    return softmax_moe.make_decoder(config, rngs)


def forward(model: Decoder, config: MixtralConfig, inputs: ForwardInputs, options: ForwardOptions) -> ForwardOutput:
    """Runs the decoder; see `run_decoder`."""
    return softmax_moe.run(model, config, inputs, options, norm_topk_prob=True)
