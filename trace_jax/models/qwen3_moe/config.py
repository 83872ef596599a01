"""Shape and constants of a Qwen3-MoE decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.models.decoder_config import MoeConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """Hyper-parameters of a Qwen3-MoE decoder beside those that every family has; all layers have experts.

    Args:
      norm_topk_prob: whether the k selected router probabilities are rescaled to sum to one.
      attention_bias: whether the four attention projections have a bias.
    """

    FAMILY = "qwen3_moe"

    norm_topk_prob: bool = True
    attention_bias: bool = False
