"""Shape and constants of an OLMoE decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.models.decoder_config import MoeConfig


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoeConfig):
    """Hyper-parameters of an OLMoE decoder beside those that every family has; all layers have experts.

    Args:
      norm_topk_prob: whether the k selected router probabilities are rescaled to sum to one.
      attention_bias: whether the four attention projections have a bias.
    """

    FAMILY = "olmoe"

    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    norm_topk_prob: bool = False
    attention_bias: bool = False

    @property
    def attention_norms(self) -> tuple[int, int]:
        """Lengths of the norms of queries and keys."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
