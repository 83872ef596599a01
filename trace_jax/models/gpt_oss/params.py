"""Names of gpt-oss weights in Hugging Face checkpoints.

The experts of a layer are one tensor each for gate and up together, and for down, `[E, in, out]`; rows of gate and up take turns. In the
published MXFP4 files the same tensors are blocks and scales, which `quantized_files` shows in this form.
"""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.models.gpt_oss.config import GptOssConfig
from trace_jax.models.key_map import Entry, LayerTensor, attention_tensors, decoder_entries, gated_shapes, layer_norm_tensors

ALL = slice(None)
TURNS = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}


def key_map(config: GptOssConfig) -> list[Entry]:
    """Every tensor of a checkpoint."""

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        yield from attention_tensors(config, biases="qkvo")
        yield LayerTensor("self_attn.sinks", (config.num_heads,), ("attention", "sinks"))
        yield from layer_norm_tensors(config)
        yield LayerTensor("mlp.router.weight", (config.num_experts, config.hidden_size), ("router",))
        yield LayerTensor("mlp.router.bias", (config.num_experts,), ("router_bias",))
        yield from _experts(config)

    return decoder_entries(config, of_layer)


def _experts(config: GptOssConfig) -> Iterator[LayerTensor]:
    count, shapes = config.num_experts, gated_shapes(config.hidden_size, config.expert_hidden_size)
    for part, turn in TURNS.items():
        yield LayerTensor("mlp.experts.gate_up_proj", (count, *shapes[part]), ("experts", part), None, (ALL, ALL, turn), True)
    for part, turn in TURNS.items():
        yield LayerTensor("mlp.experts.gate_up_proj_bias", (count, shapes[part][0]), ("expert_biases", part), None, (ALL, turn))
    yield LayerTensor("mlp.experts.down_proj", (count, *shapes["down"]), ("experts", "down"), transposed=True)
    yield LayerTensor("mlp.experts.down_proj_bias", (count, config.hidden_size), ("expert_biases", "down"))
