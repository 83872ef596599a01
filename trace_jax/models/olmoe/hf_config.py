"""Hugging Face `config.json` of OLMoE, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.hf_config import ConfigKeys, agreeing, build, head_dim, read_keys, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.olmoe.config import OlmoeConfig

KEYS = ConfigKeys(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    required={"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "intermediate_size": "expert_hidden_size"},
    optional={
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "norm_topk_prob": ("norm_topk_prob", False),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_bias": ("attention_bias", False),
    },
    fixed={"hidden_act": ("silu",), "attention_dropout": (0, None), "clip_qkv": (None,)},
    handled=frozenset({"num_local_experts"}),
)


def from_hf(config_json: dict[str, Any]) -> OlmoeConfig:
    """Reads a parsed `config.json`; the heads divide the width, there is no key for another head width.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (clipped queries, another rope type or activation, quantized weights).
    """
    experts = agreeing({name: config_json.get(name) for name in ("num_experts", "num_local_experts")})
    values = read_keys(config_json, KEYS, num_experts=experts)
    values["head_dim"] = head_dim({}, values)
    values["rope_theta"] = read_rope(config_json, default_theta=10_000.0).theta
    return build(OlmoeConfig, values)


def to_hf(config: OlmoeConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints.

    Raises:
      UserError: heads whose width the file cannot state.
    """
    if config.head_dim * config.num_heads != config.hidden_size:
        raise UserError(f"olmoe has no key for a head_dim of {config.head_dim}; it must be hidden_size divided by num_heads")
    return {**write_keys(config, KEYS), **write_rope(config.rope_theta, None)}
