"""Names of Qwen3-MoE weights in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.models.key_map import Entry, LayerTensor, attention_tensors, decoder_entries, expert_tensors, layer_norm_tensors
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig


def key_map(config: Qwen3MoeConfig) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout."""

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        yield from attention_tensors(config, (config.head_dim, config.head_dim), "qkvo" if config.attention_bias else "")
        yield from layer_norm_tensors(config)
        yield LayerTensor("mlp.gate.weight", (config.num_experts, config.hidden_size), ("router",))
        yield from expert_tensors(config)

    return decoder_entries(config, of_layer)
