"""Hugging Face `config.json` of GLM-4.5, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models import biased_moe
from trace_jax.models.glm4_moe.config import Glm4MoeConfig
from trace_jax.models.hf_config import ConfigKeys, build, head_dim, read_keys, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope

KEYS = ConfigKeys(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    required=biased_moe.REQUIRED_KEYS,
    optional=biased_moe.OPTIONAL_KEYS
    | {
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "routed_scaling_factor": ("routed_scaling", 1.0),
        "use_qk_norm": ("qk_norm", False),
        "attention_bias": ("attention_bias", False),
    },
    fixed={"hidden_act": ("silu",), "attention_dropout": (0, None)},
    irrelevant=biased_moe.IRRELEVANT_KEYS,
    handled=frozenset({"head_dim", "partial_rotary_factor", *biased_moe.EXPERT_SPELLINGS}),
)


def from_hf(config_json: dict[str, Any]) -> Glm4MoeConfig:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (another rope type or activation, quantized weights).
    """
    values = read_keys(config_json, KEYS, n_routed_experts=biased_moe.experts_in(config_json))
    values["head_dim"] = head_dim(config_json, values)
    rope = read_rope(config_json, partial=True, default_share=0.5)
    values |= {"rope_theta": rope.theta, "rotary_dim": int(values["head_dim"] * rope.rotated)}
    return build(Glm4MoeConfig, values)


def to_hf(config: Glm4MoeConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {
        **write_keys(config, KEYS),
        **write_rope(config.rope_theta, None),
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "num_nextn_predict_layers": 0,
    }
