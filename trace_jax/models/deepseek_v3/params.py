"""Names of DeepSeek-V3 weights in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from trace_jax.models import biased_moe
from trace_jax.models.deepseek_v3.config import DeepseekV3Config
from trace_jax.models.key_map import Entry, LayerTensor


def key_map(config: DeepseekV3Config) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout, without layers that predict further tokens."""
    return biased_moe.key_map(config, lambda: _attention(config))


def _attention(config: DeepseekV3Config) -> Iterator[LayerTensor]:
    width, heads, rank, latent = config.hidden_size, config.num_heads, config.query_rank, config.latent_rank
    named = {
        "kv_a_proj_with_mqa": ("kv_a_proj", (latent + config.rotary_dim, width)),
        "kv_a_layernorm": ("kv_a_norm", (latent,)),
        "kv_b_proj": ("kv_b_proj", (heads * (config.plain_dim + config.value_dim), latent)),
        "o_proj": ("o_proj", (width, heads * config.value_dim)),
    }
    if rank:
        query = {"q_a_proj": (rank, width), "q_a_layernorm": (rank,), "q_b_proj": (heads * config.head_dim, rank)}
        named = {name: (name.replace("layernorm", "norm"), shape) for name, shape in query.items()} | named
    else:
        named = {"q_proj": ("q_proj", (heads * config.head_dim, width))} | named
    for name, (path, shape) in named.items():
        yield LayerTensor(f"self_attn.{name}.weight", shape, ("attention", path))
