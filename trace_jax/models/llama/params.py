"""Names of the weights in Hugging Face checkpoints."""

from __future__ import annotations

from trace_jax.models import dense
from trace_jax.models.key_map import Entry
from trace_jax.models.llama.config import LlamaConfig


def key_map(config: LlamaConfig) -> list[Entry]:
    """Every tensor of a checkpoint."""
    return dense.key_map(config, config.ffn_hidden_size, biases="qkvo" if config.attention_bias else "")
