"""Hugging Face `config.json` of dense Qwen3, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models.hf_config import ConfigKeys, build, head_dim, read_keys, require, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.qwen3.config import Qwen3Config

KEYS = ConfigKeys(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    required={"intermediate_size": "ffn_hidden_size"},
    optional={
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_bias": ("attention_bias", False),
    },
    fixed={"hidden_act": ("silu",), "use_sliding_window": (False, None), "attention_dropout": (0, None)},
    irrelevant=frozenset({"sliding_window", "max_window_layers"}),  # without effect while use_sliding_window is false
    handled=frozenset({"head_dim", "layer_types"}),
)


def from_hf(config_json: dict[str, Any]) -> Qwen3Config:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (a sliding window, another rope type or activation, quantized weights).
    """
    values = read_keys(config_json, KEYS)
    for kind in config_json.get("layer_types") or []:
        require("layer_types", kind, "full_attention")
    values["head_dim"] = head_dim(config_json, values)
    values["rope_theta"] = read_rope(config_json).theta
    return build(Qwen3Config, values)


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {**write_keys(config, KEYS), **write_rope(config.rope_theta, None), "head_dim": config.head_dim, "sliding_window": None}
