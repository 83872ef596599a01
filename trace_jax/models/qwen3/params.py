"""Names of the weights in Hugging Face checkpoints."""

from __future__ import annotations

from trace_jax.models import dense
from trace_jax.models.key_map import Entry
from trace_jax.models.qwen3.config import Qwen3Config


def key_map(config: Qwen3Config) -> list[Entry]:
    """Every tensor of a checkpoint."""
    return dense.key_map(
        config, config.ffn_hidden_size, norms=(config.head_dim, config.head_dim), biases="qkvo" if config.attention_bias else ""
    )
