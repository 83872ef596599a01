"""config.json of Qwen3-MoE: both spellings, and everything that must be refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trace_jax.errors import UserError
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.qwen3_moe.hf_config import from_hf, to_hf

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The keys of the published 30B-A3B checkpoint."""

EXPECTED = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_hidden_size=768,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    tie_embeddings=False,
    max_position=40960,
    attention_bias=False,
)


def changed(**changes: Any) -> dict[str, Any]:
    """The published config with keys set, or removed where the value is `...`."""
    return {key: value for key, value in {**PUBLISHED, **changes}.items() if value is not ...}


def test_reads_the_published_spelling() -> None:
    assert from_hf(PUBLISHED) == EXPECTED


def test_reads_the_transformers_5_spelling() -> None:
    new = changed(
        rope_theta=..., rope_scaling=..., num_experts=..., torch_dtype=..., num_local_experts=128, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    assert from_hf(new) == EXPECTED


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_scaling": {"type": "default"}},
        {"num_local_experts": 128},
        {"mlp_only_layers": None},
        {"layer_types": ["full_attention"] * 48},
        {"architectures": ...},
        {"sliding_window": 4096},
        {"rope_theta": 1000000},
    ],
)
def test_reads_both_spellings_at_once_where_they_agree(changes: dict[str, Any]) -> None:
    assert from_hf(changed(**changes)) == EXPECTED


def test_absent_optional_keys_mean_what_transformers_takes() -> None:
    config = from_hf(changed(norm_topk_prob=..., tie_word_embeddings=..., attention_bias=..., rms_norm_eps=..., head_dim=...))
    assert config == dataclasses.replace(EXPECTED, norm_topk_prob=False, head_dim=64)


def test_hf_05_every_rope_field_is_read() -> None:
    assert from_hf(changed(rope_theta=500.0)).rope_theta == 500.0
    parameters = {"rope_type": "default", "rope_theta": 700.0}
    assert from_hf(changed(rope_theta=..., rope_parameters=parameters)).rope_theta == 700.0


ROPE_TYPES = ("yarn", "llama3", "dynamic", "linear", "longrope", "proportional", "mrope")


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("key, type_key", [("rope_parameters", "rope_type"), ("rope_scaling", "rope_type"), ("rope_scaling", "type")])
def test_hf_04_unsupported_rope_types_are_refused(rope_type: str, key: str, type_key: str) -> None:
    rope = {type_key: rope_type, "factor": 4.0, "rope_theta": 1000000.0}
    with pytest.raises(UserError, match=rf"config\.json: {key}\.{type_key} is '{rope_type}'.*take a checkpoint"):
        from_hf(changed(**{key: rope}))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": ...}, "no model_type; write 'qwen3_moe'"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*BF16"),
        ({"sinks": True, "auto_map": {}}, "unknown auto_map, sinks"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "contradicts itself: rope_theta=1000000.0 and rope_parameters.rope_theta=5.0"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "unknown rope_scaling.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "unknown rope_parameters.full_attention"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'; it must be a mapping"),
        ({"num_local_experts": 64}, "contradicts itself: num_experts=128 and num_local_experts=64"),
        ({"num_experts": ...}, "num_experts is missing"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'; it must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be a finite number"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'; it must be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be greater than 0"),
        ({"num_key_value_heads": 5}, "must divide"),
        ({"head_dim": ..., "num_attention_heads": 36}, "write head_dim"),
    ],
)
def test_refuses_with_the_key_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"config\.json.*" + message) as caught:
        from_hf(changed(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True, "attention_bias": True, "head_dim": 64, "rope_theta": 12.5, "norm_topk_prob": False}]
)
def test_written_config_reads_back(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(EXPECTED, **changes)
    assert from_hf(to_hf(config)) == config


def test_writes_only_keys_that_the_published_config_has() -> None:
    assert set(to_hf(EXPECTED)) <= set(PUBLISHED)
    differing = {key for key, value in to_hf(EXPECTED).items() if PUBLISHED[key] != value}
    assert differing == {"intermediate_size"}, "the width of dense layers, which no layer has, is not kept"
