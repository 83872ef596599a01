"""Names of Mixtral weights in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.models.key_map import Entry, LayerTensor, attention_tensors, decoder_entries, expert_tensors, layer_norm_tensors
from trace_jax.models.mixtral.config import MixtralConfig

PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def key_map(config: MixtralConfig) -> list[Entry]:
    """Every tensor of a checkpoint in the layout of the published ones."""

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        yield from attention_tensors(config)
        yield from layer_norm_tensors(config)
        yield LayerTensor("block_sparse_moe.gate.weight", (config.num_experts, config.hidden_size), ("router",))
        yield from expert_tensors(config, "block_sparse_moe.experts.{expert}.{part}.weight", PARTS)

    return decoder_entries(config, of_layer)
