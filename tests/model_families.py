"""Tiny models of every family: our config, and what makes transformers build the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trace_jax.models.registry import ModelConfig, config_from_dict

COMMON_HF: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position": 128,
}
MOE: dict[str, Any] = {"num_experts": 6, "experts_per_token": 2, "expert_hidden_size": 32}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
      transformers: stem of the names of its classes there.
      hf: arguments of their config class, beside the common ones.
      cases: further changes to them, by name; each must be computed as transformers does.
      config: fields of our config, beside the common ones, of the model that the engine tests run; `...` takes one away.
      refused: keys of config.json that mean another computation, with a part of the error message.
    """

    transformers: str
    hf: dict[str, Any]
    config: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "olmoe": Family(
        "Olmoe",
        {"num_hidden_layers": 2, "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "rope_parameters": DEFAULT_ROPE},
        MOE | {"head_dim": 8},
        {"norm_topk_prob": {"norm_topk_prob": True}, "tied_bias": {"tie_word_embeddings": True, "attention_bias": True}},
        {"clipped": ({"clip_qkv": 8.0}, "clip_qkv is 8.0"), "yarn": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.type is 'yarn'")},
    ),
    "mixtral": Family(
        "Mixtral",
        {
            "num_hidden_layers": 2, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
            "rope_parameters": DEFAULT_ROPE,
        },
        MOE,
        {"rms_norm_eps": {"rms_norm_eps": 1e-2}, "tied": {"tie_word_embeddings": True}},
        {"window": ({"sliding_window": 4096}, "sliding_window is 4096"), "act": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'")},
    ),
    "qwen3": Family(
        "Qwen3",
        {"num_hidden_layers": 2, "intermediate_size": 20, "head_dim": 16, "rope_parameters": DEFAULT_ROPE},
        {"ffn_hidden_size": 48},
        {"tied_bias": {"tie_word_embeddings": True, "attention_bias": True}},
        {"window": ({"use_sliding_window": True}, "use_sliding_window is True")},
    ),
    "llama": Family(
        "Llama",
        {"num_hidden_layers": 2, "intermediate_size": 20, "head_dim": 16, "rope_parameters": DEFAULT_ROPE},
        {"ffn_hidden_size": 48},
        {
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
            "yarn_rope": {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
                }
            },
            "tied_bias": {"tie_word_embeddings": True, "attention_bias": True},
        },
        {"mlp_bias": ({"mlp_bias": True}, "mlp_bias is True"), "dynamic": ({"rope_scaling": {"type": "dynamic"}}, "'dynamic'")},
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        {
            "num_hidden_layers": 3, "intermediate_size": 24, "moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True,
            "attention_bias": True, "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        },
        MOE | {"num_layers": 3, "dense_layers": 1, "dense_hidden_size": 48, "rotary_dim": 8, "qk_norm": True, "attention_bias": True},
        {
            "groups": {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
            "two_dense_two_shared": {"first_k_dense_replace": 2, "n_shared_experts": 2, "use_qk_norm": False, "attention_bias": False},
        },
        {"yarn": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.type is 'yarn'"), "act": ({"hidden_act": "gelu"}, "hidden_act")},
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        {
            "num_hidden_layers": 5, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "num_experts": 6,
            "num_experts_per_tok": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "layer_types": (["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2),
            "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25},
        },
        MOE | {
            "num_layers": 5, "rotary_dim": 4, "shared_hidden_size": 24, "linear_key_heads": 2, "linear_value_heads": 4,
            "linear_key_dim": 8, "linear_value_dim": 6, "full_attention_interval": 2,
        },
        {
            "every_second_same_heads": {
                "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 2,
                "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
            }
        },
        {
            "order": ({"layer_types": ["full_attention"] + ["linear_attention"] * 4}, "layer_types"),
            "vision": ({"model_type": "qwen3_5_moe"}, "vision tower"),
        },
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            "num_hidden_layers": 5, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
            "sliding_window": 4, "rope_parameters": YARN_ROPE,
        },
        MOE | {"num_layers": 3, "sliding_window": 4, "swiglu_limit": 1.0},
        {"one_pair_other_gate": {"num_hidden_layers": 2, "swiglu_alpha": 1.3, "swiglu_limit": 0.5, "rope_parameters": DEFAULT_ROPE}},
        {
            "layers": ({"layer_types": ["full_attention"] * 5}, "layer_types"),
            "bias": ({"attention_bias": False}, "attention_bias is False"),
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24, "moe_intermediate_size": 20, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
            "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5,
            "rope_parameters": DEFAULT_ROPE,
        },
        {
            "num_layers": 3, "num_experts": 8, "experts_per_token": 2, "expert_hidden_size": 32, "dense_layers": 1,
            "dense_hidden_size": 48, "expert_groups": 4, "kept_groups": 2, "query_rank": 24, "latent_rank": 16, "plain_dim": 12,
            "rotary_dim": 8, "value_dim": 10, "num_kv_heads": ..., "head_dim": ...,
        },
        {
            "plain_query_one_group": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
            "yarn": {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 32,
                    "mscale": 1.0, "mscale_all_dim": 1.0,
                }
            },
        },
        {"bias": ({"attention_bias": True}, "attention_bias is True"), "router": ({"scoring_func": "softmax"}, "scoring_func")},
    ),
}  # fmt: skip


def config_of(family: str, **changes: Any) -> ModelConfig:
    """The tiny config of a family for the engine tests."""
    values = COMMON | FAMILIES[family].config | changes
    return config_from_dict(family, {name: value for name, value in values.items() if value is not ...})
