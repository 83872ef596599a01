"""Hugging Face `config.json` of Mixtral, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models.hf_config import ConfigKeys, agreeing, build, head_dim, read_keys, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.mixtral.config import MixtralConfig

KEYS = ConfigKeys(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    required={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_hidden_size",
    },
    optional={"rms_norm_eps": ("rms_norm_eps", 1e-5), "tie_word_embeddings": ("tie_embeddings", False)},
    fixed={"hidden_act": ("silu",), "attention_dropout": (0, None), "sliding_window": (None,)},
    irrelevant=frozenset({"router_jitter_noise"}),  # acts in the training of transformers only
    handled=frozenset({"head_dim", "num_experts"}),
)


def from_hf(config_json: dict[str, Any]) -> MixtralConfig:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (a sliding window, another rope type or activation, quantized weights).
    """
    experts = agreeing({name: config_json.get(name) for name in ("num_local_experts", "num_experts")})
    values = read_keys(config_json, KEYS, num_local_experts=experts)
    values["head_dim"] = head_dim(config_json, values)
    values["rope_theta"] = read_rope(config_json, default_theta=1_000_000.0).theta
    return build(MixtralConfig, values)


def to_hf(config: MixtralConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {**write_keys(config, KEYS), **write_rope(config.rope_theta, None), "head_dim": config.head_dim}
