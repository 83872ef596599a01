"""Shape and constants of a dense Qwen3 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Hyper-parameters of a dense Qwen3 decoder beside those that every family has.

    Args:
      ffn_hidden_size: hidden width of the feed-forward networks.
      attention_bias: whether the four attention projections have a bias.
    """

    FAMILY = "qwen3"

    ffn_hidden_size: int
    attention_bias: bool = False
