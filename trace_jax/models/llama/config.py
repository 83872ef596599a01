"""Shape and constants of a Llama decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.layers.rope import RopeScaling
from trace_jax.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Hyper-parameters of a Llama decoder beside those that every family has.

    Args:
      ffn_hidden_size: hidden width of the feed-forward networks.
      attention_bias: whether the four attention projections have a bias.
      rope_scaling: frequencies of a longer context, `llama3` or `yarn`; None without.
    """

    FAMILY = "llama"

    ffn_hidden_size: int
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
