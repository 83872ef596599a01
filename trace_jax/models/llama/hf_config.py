"""Hugging Face `config.json` of Llama, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models.hf_config import ConfigKeys, build, head_dim, read_keys, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.llama.config import LlamaConfig

KEYS = ConfigKeys(
    model_type="llama",
    architecture="LlamaForCausalLM",
    required={"intermediate_size": "ffn_hidden_size"},
    optional={
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_bias": ("attention_bias", False),
    },
    fixed={
        "hidden_act": ("silu",),
        "attention_dropout": (0, None),
        "mlp_bias": (False,),
        "is_llama_config": (True,),
        "rope_interleaved": (False,),
    },
    unwritten=frozenset({"is_llama_config", "rope_interleaved"}),  # keys of SmolLM2's files
    irrelevant=frozenset({"pretraining_tp"}),  # how the products were cut during the pretraining
    handled=frozenset({"head_dim"}),
)


def from_hf(config_json: dict[str, Any]) -> LlamaConfig:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (biases in the feed-forward network, another rope type or activation, quantized weights).
    """
    heads = config_json.get("num_key_value_heads") or config_json.get("num_attention_heads")
    values = read_keys(config_json, KEYS, num_key_value_heads=heads)
    values["head_dim"] = head_dim(config_json, values)
    rope = read_rope(config_json, kinds=("llama3", "yarn"), default_theta=10_000.0)
    return build(LlamaConfig, values | {"rope_theta": rope.theta, "rope_scaling": rope.scaling})


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {**write_keys(config, KEYS), **write_rope(config.rope_theta, config.rope_scaling), "head_dim": config.head_dim}
