"""Hugging Face `config.json` of gpt-oss, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models.gpt_oss.config import GptOssConfig
from trace_jax.models.hf_config import ConfigKeys, agreeing, build, head_dim, read_keys, require, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope

KEYS = ConfigKeys(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    required={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_hidden_size",
        "sliding_window": "sliding_window",
    },
    optional={
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_embeddings", False),
        "swiglu_limit": ("swiglu_limit", 7.0),
        "swiglu_alpha": ("swiglu_alpha", 1.702),
    },
    fixed={"hidden_act": ("silu",), "attention_dropout": (0, None), "attention_bias": (True,)},
    handled=frozenset({"head_dim", "layer_types", "num_experts", "experts_per_token", "initial_context_length"}),
)


def from_hf(config_json: dict[str, Any]) -> GptOssConfig:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (windows in other layers, another rope type or activation, no biases).
    """
    experts = agreeing({name: config_json.get(name) for name in ("num_local_experts", "num_experts")})
    per_token = agreeing({name: config_json.get(name) for name in ("num_experts_per_tok", "experts_per_token")})
    values = read_keys(config_json, KEYS, num_local_experts=experts, num_experts_per_tok=per_token)
    require("layer_types", config_json.get("layer_types"), _layer_types(values["num_layers"]), None)
    values["head_dim"] = head_dim(config_json, values)
    rope = read_rope(config_json, kinds=("yarn",), default_theta=150_000.0)
    if rope.scaling is not None:
        original = {"rope_scaling": rope.scaling.original_max_position, "initial_context_length": config_json.get("initial_context_length")}
        agreeing(original)
    return build(GptOssConfig, values | {"rope_theta": rope.theta, "rope_scaling": rope.scaling})


def to_hf(config: GptOssConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {
        **write_keys(config, KEYS),
        **write_rope(config.rope_theta, config.rope_scaling),
        "head_dim": config.head_dim,
        "layer_types": _layer_types(config.num_layers),
    }


def _layer_types(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
