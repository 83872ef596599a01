"""config.json of every family: what is written reads back, and what would change the computation is refused by its key."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny
from exported_policy import random_params
from model_families import FAMILIES, config_of
from safetensors.numpy import load_file, save_file

from trace_jax.config import from_mapping
from trace_jax.errors import UserError
from trace_jax.layers.rope import RopeScaling, tables
from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.registry import ModelConfig
from trace_jax.quantization.plan import rollout_plan
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.train.setup import build_setup

YARN = RopeScaling("yarn", 8.0, 64, beta_fast=4.0, beta_slow=0.5, attention_factor=1.2, truncate=False)
LLAMA3 = RopeScaling("llama3", 8.0, 32)


def written(config: ModelConfig) -> dict[str, Any]:
    return importlib.import_module(f"trace_jax.models.{config.FAMILY}.hf_config").to_hf(config)


def read(name: str, config_json: dict[str, Any]) -> ModelConfig:
    return importlib.import_module(f"trace_jax.models.{name}.hf_config").from_hf(config_json)


@pytest.mark.parametrize("name", FAMILIES)
def test_written_config_reads_back(name: str) -> None:
    config = config_of(name, tie_embeddings=True, rope_theta=12.5)
    assert read(name, json.loads(json.dumps(written(config)))) == config


@pytest.mark.parametrize(("name", "scaling"), [("llama", YARN), ("llama", LLAMA3), ("gpt_oss", YARN), ("deepseek_v3", YARN)])
def test_a_scaled_rope_reads_back_from_files_and_mappings(name: str, scaling: RopeScaling) -> None:
    config = replace(config_of(name), rope_scaling=scaling)
    assert read(name, json.loads(json.dumps(written(config)))) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink_tokens": 4}, "unknown sink_tokens"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be an integer"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        ({"architectures": ["Other"]}, "architectures"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ],
)
def test_refuses_with_the_key_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"config\.json.*{message}") as caught:
        read(name, written(config_of(name)) | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, family in FAMILIES.items() for case in family.refused])
def test_refuses_what_the_family_does_not_compute(name: str, case: str) -> None:
    change, message = FAMILIES[name].refused[case]
    with pytest.raises(UserError, match=message):
        read(name, written(config_of(name)) | change)


@pytest.mark.parametrize("field", ["factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor", "truncate"])
def test_hf_05_every_field_of_yarn_changes_the_angles(field: str) -> None:
    _every_field_counts(YARN, field)


@pytest.mark.parametrize("field", ["factor", "original_max_position", "low_freq_factor", "high_freq_factor"])
def test_hf_05_every_field_of_llama3_changes_the_angles(field: str) -> None:
    _every_field_counts(LLAMA3, field)


def _every_field_counts(scaling: RopeScaling, field: str) -> None:
    value = getattr(scaling, field)
    other = replace(scaling, **{field: not value if isinstance(value, bool) else 2 * value})
    positions = jnp.arange(7, dtype=jnp.int32)[None]
    ours, changed = (np.stack(tables(positions, 32, 10_000.0, which)) for which in (scaling, other))
    assert np.max(np.abs(ours - changed)) > 1e-3


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out_and_others_are_not(tmp_path: Path, name: str) -> None:
    config = config_of(name)
    save_hf_directory(tmp_path, name, config, random_params(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.{config.num_layers}.eh_proj.weight": np.ones((2, 2), np.float32)}
    save_file(tensors, file)
    with pytest.raises(UserError, match=rf"has unknown model\.layers\.{config.num_layers}\.eh_proj"):
        load_hf_directory(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    assert load_hf_directory(tmp_path).config == config


def test_the_correction_of_the_router_stays_float32(tmp_path: Path) -> None:
    config = config_of("deepseek_v3")
    params = random_params(config)
    save_hf_directory(tmp_path, "deepseek_v3", config, params)
    found = load_hf_directory(tmp_path).params["groups"][1]
    assert np.array_equal(found["router_correction"], params["groups"][1]["router_correction"])
    assert not np.array_equal(found["router"], params["groups"][1]["router"]), "BF16 would have rounded it"


def test_kv_cache_of_latent_attention_is_not_rounded() -> None:
    policy, reason = tiny.policy(config=config_of("deepseek_v3")), "deepseek_v3 caches one latent vector for all heads"
    with pytest.raises(UserError, match=f"rollout.kv_cache.k is nvfp4, but {reason}.*write rollout.kv_cache: {{k: bf16, v: bf16}}"):
        EmbeddedEngine(policy, rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4"), CaptureSpec())
    model = {"family": "deepseek_v3", "config": config_of("deepseek_v3", vocab_size=259).to_dict()}
    with pytest.raises(UserError, match=reason):
        build_setup(from_mapping({"model": model, "tokenizer": "byte"}))


def test_a_dense_family_has_no_experts_to_round() -> None:
    model = {"family": "llama", "config": config_of("llama", vocab_size=259).to_dict()}
    with pytest.raises(UserError, match="rollout.weights rounds routed experts, and llama has none; write bf16"):
        build_setup(from_mapping({"model": model, "tokenizer": "byte"}))
    assert build_setup(from_mapping({"model": model, "tokenizer": "byte", "method": "bf16"})).policy.config.moe_layer_ids == ()
