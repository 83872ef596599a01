"""Names of Qwen3.5-MoE weights in Hugging Face checkpoints of the text model."""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.models.key_map import Entry, LayerTensor, attention_tensors, decoder_entries, expert_tensors, layer_norm_tensors, mlp_tensors
from trace_jax.models.qwen3_5_moe.config import LINEAR, Qwen35MoeConfig


def key_map(config: Qwen35MoeConfig) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout."""
    width = config.hidden_size

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        if kind == LINEAR:
            yield from _delta_net(config)
        else:
            yield from attention_tensors(config, (config.head_dim, config.head_dim), gated=True)
        yield from layer_norm_tensors(config)
        yield LayerTensor("mlp.gate.weight", (config.num_experts, width), ("router",))
        yield from expert_tensors(config)
        yield from mlp_tensors(config, config.shared_hidden_size, "mlp.shared_expert", "shared_experts")
        yield LayerTensor("mlp.shared_expert_gate.weight", (1, width), ("shared_gate",))

    return decoder_entries(config, of_layer)


def _delta_net(config: Qwen35MoeConfig) -> Iterator[LayerTensor]:
    width, heads, values = config.hidden_size, config.linear_value_heads, config.linear_value_width
    named = {
        "in_proj_qkv.weight": ("qkv_proj", (config.convolution_channels, width)),
        "in_proj_z.weight": ("z_proj", (values, width)),
        "in_proj_b.weight": ("b_proj", (heads, width)),
        "in_proj_a.weight": ("a_proj", (heads, width)),
        "conv1d.weight": ("conv", (config.convolution_channels, 1, config.convolution_taps)),
        "dt_bias": ("dt_bias", (heads,)),
        "A_log": ("a_log", (heads,)),
        "norm.weight": ("norm", (config.linear_value_dim,)),
        "out_proj.weight": ("o_proj", (width, values)),
    }
    for name, (path, shape) in named.items():
        yield LayerTensor(f"linear_attn.{name}", shape, ("delta_net", path))
