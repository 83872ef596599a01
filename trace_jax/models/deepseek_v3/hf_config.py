"""Hugging Face `config.json` of DeepSeek-V3, both ways."""

from __future__ import annotations

from typing import Any

from trace_jax.models import biased_moe
from trace_jax.models.deepseek_v3.config import DeepseekV3Config
from trace_jax.models.hf_config import ConfigKeys, boolean, build, integer, read_keys, require, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope

KEYS = ConfigKeys(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    required=biased_moe.REQUIRED_KEYS
    | {
        "kv_lora_rank": "latent_rank",
        "qk_nope_head_dim": "plain_dim",
        "qk_rope_head_dim": "rotary_dim",
        "v_head_dim": "value_dim",
    },
    optional=biased_moe.OPTIONAL_KEYS | {"rms_norm_eps": ("rms_norm_eps", 1e-6), "routed_scaling_factor": ("routed_scaling", 2.5)},
    fixed={
        "hidden_act": ("silu",),
        "attention_dropout": (0, None),
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    # Where the weights lie in training, and how it balanced the experts.
    irrelevant=biased_moe.IRRELEVANT_KEYS | {"ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "auto_map"},
    handled=frozenset({"q_lora_rank", "qk_head_dim", "head_dim", "rope_interleave", *biased_moe.EXPERT_SPELLINGS}),
)


def from_hf(config_json: dict[str, Any]) -> DeepseekV3Config:
    """Reads a parsed `config.json`.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (another router, rope type or activation, biases, quantized weights).
    """
    values = read_keys(config_json, KEYS, n_routed_experts=biased_moe.experts_in(config_json))
    require("num_key_value_heads", values.pop("num_kv_heads"), values["num_heads"])
    require("qk_head_dim", config_json.get("qk_head_dim"), None, values["plain_dim"] + values["rotary_dim"])
    require("head_dim", config_json.get("head_dim"), None, values["rotary_dim"])
    rank = config_json.get("q_lora_rank")
    rope = read_rope(config_json, kinds=("yarn",), default_theta=10_000.0)
    values |= {
        "query_rank": 0 if rank is None else integer("q_lora_rank", rank),
        "interleaved": boolean("rope_interleave", config_json.get("rope_interleave", True)),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    return build(DeepseekV3Config, values)


def to_hf(config: DeepseekV3Config) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints."""
    return {
        **write_keys(config, KEYS),
        **write_rope(config.rope_theta, config.rope_scaling, mscale_all_dim=config.mscale_all_dim),
        "num_nextn_predict_layers": 0,
        "q_lora_rank": config.query_rank or None,
        "rope_interleave": config.interleaved,
    }
