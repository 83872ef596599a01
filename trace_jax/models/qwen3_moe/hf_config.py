"""Hugging Face `config.json` of Qwen3-MoE, both ways: published checkpoints write `num_experts`, transformers 5 `num_local_experts`."""

from __future__ import annotations

from typing import Any

from trace_jax.models.hf_config import ConfigKeys, agreeing, build, head_dim, read_keys, require, write_keys
from trace_jax.models.hf_rope import read_rope, write_rope
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig

KEYS = ConfigKeys(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    required={
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_hidden_size",
    },
    optional={
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "norm_topk_prob": ("norm_topk_prob", False),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_bias": ("attention_bias", False),
    },
    fixed={
        "hidden_act": ("silu",),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "use_sliding_window": (False, None),
        "attention_dropout": (0, None),
        "partial_rotary_factor": (1, None),
        "is_encoder_decoder": (False,),
    },
    unwritten=frozenset({"partial_rotary_factor", "is_encoder_decoder"}),
    # The width of dense layers, of which there are none; the others are without effect while use_sliding_window is false.
    irrelevant=frozenset({"intermediate_size", "sliding_window", "max_window_layers"}),
    handled=frozenset({"head_dim", "num_local_experts", "layer_types"}),
)


def from_hf(config_json: dict[str, Any]) -> Qwen3MoeConfig:
    """Reads a parsed `config.json`, in either spelling.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (another rope type, sliding window, dense layers, another activation, quantized weights).
    """
    experts = agreeing({name: config_json.get(name) for name in ("num_experts", "num_local_experts")})
    values = read_keys(config_json, KEYS, num_experts=experts)
    for kind in config_json.get("layer_types") or []:
        require("layer_types", kind, "full_attention")
    values["head_dim"] = head_dim(config_json, values)
    values["rope_theta"] = read_rope(config_json).theta
    return build(Qwen3MoeConfig, values)


def to_hf(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints, which transformers 4, 5 and vLLM all read."""
    return {
        **write_keys(config, KEYS),
        **write_rope(config.rope_theta, None),
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_hidden_size,
        "sliding_window": None,
    }
