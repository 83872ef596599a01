"""Names of GLM-4.5 weights in Hugging Face checkpoints."""

from __future__ import annotations

from trace_jax.models import biased_moe
from trace_jax.models.glm4_moe.config import Glm4MoeConfig
from trace_jax.models.key_map import Entry, attention_tensors


def key_map(config: Glm4MoeConfig) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout, without layers that predict further tokens."""
    return biased_moe.key_map(config, lambda: attention_tensors(config, config.norms, config.biases))
