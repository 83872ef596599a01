"""Hugging Face `config.json` of the text model of Qwen3.5-MoE, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.hf_config import ConfigKeys, agreeing, build, head_dim, integer, read_keys, require, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.qwen3_5_moe.config import Qwen35MoeConfig

KEYS = ConfigKeys(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    required={
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_hidden_size",
        "shared_expert_intermediate_size": "shared_hidden_size",
        "linear_num_key_heads": "linear_key_heads",
        "linear_num_value_heads": "linear_value_heads",
        "linear_key_head_dim": "linear_key_dim",
        "linear_value_head_dim": "linear_value_dim",
        "linear_conv_kernel_dim": "convolution_taps",
    },
    optional={"rms_norm_eps": ("rms_norm_eps", 1e-6), "tie_word_embeddings": ("tie_embeddings", False)},
    fixed={"hidden_act": ("silu",), "attention_dropout": (0, None), "attention_bias": (False,)},
    handled=frozenset({"head_dim", "layer_types", "full_attention_interval", "num_local_experts", "partial_rotary_factor"}),
)


def from_hf(config_json: dict[str, Any]) -> Qwen35MoeConfig:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (pictures, another order of layers, another rope type or activation).
    """
    if config_json.get("model_type") == Qwen35MoeConfig.FAMILY:
        raise UserError("config.json describes a model with a vision tower; take the checkpoint of its text model (qwen3_5_moe_text)")
    experts = agreeing({name: config_json.get(name) for name in ("num_experts", "num_local_experts")})
    values = read_keys(config_json, KEYS, num_experts=experts)
    values["head_dim"] = head_dim(config_json, values)
    rope = read_rope(config_json, partial=True, default_share=0.25)
    values |= {"rope_theta": rope.theta, "rotary_dim": int(values["head_dim"] * rope.rotated)}
    kinds = config_json.get("layer_types")
    interval = config_json.get("full_attention_interval")
    if interval is None:
        interval = 4 if kinds is None else _interval(kinds)
    values["full_attention_interval"] = integer("full_attention_interval", interval)
    config = build(Qwen35MoeConfig, values)
    require("layer_types", kinds, _layer_types(config), None)
    return config


def to_hf(config: Qwen35MoeConfig) -> dict[str, Any]:
    """The `config.json` mapping of a text model, as transformers 5 writes it."""
    return {
        **write_keys(config, KEYS),
        **write_rope(config.rope_theta, None),
        "head_dim": config.head_dim,
        "layer_types": _layer_types(config),
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
    }


def _interval(kinds: Any) -> int:
    """Layers up to the first one with attention; one more than there are where none has it."""
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


def _layer_types(config: Qwen35MoeConfig) -> list[str]:
    attention = set(config.layers_of("k"))
    return ["full_attention" if layer in attention else "linear_attention" for layer in range(config.num_layers)]
