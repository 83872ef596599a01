"""What an export says about itself: the fields that vLLM reads, and exclusions by exact names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from exported_policy import multipliers, random_params, save
from tiny_policy import CONFIG, TIED, policy

from rollout_bridge.export import ExportSettings, export_checkpoint
from rollout_bridge.export.decode import ExportedFiles
from rollout_bridge.export.layout import require_whole_blocks
from rollout_bridge.export.quant_config import hf_quant_config, quantization_config
from trace_jax.errors import UserError

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def excluded_by_vllm(name: str, ignore: list[str]) -> bool:
    """How vLLM 0.26 to 0.33 reads a ModelOpt list: exact (fused projections by their parts), then as a substring, then as a pattern."""
    last = name.rpartition(".")[2]
    if last in FUSED:
        return all(name.replace(last, part) in ignore for part in FUSED[last])
    return any(name == item or item in name or fnmatch(name, item) for item in ignore)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_exp_01_the_list_names_exactly_the_modules_without_codes(exported: Callable, fmt: str) -> None:
    made = exported(fmt)
    declared = made.files.declared
    plain = {name.removesuffix(".weight") for name, (dtype, _) in declared.items() if dtype == "BF16"}
    ignore = made.config["quantization_config"]["ignore"]
    assert set(ignore) == plain and len(set(ignore)) == len(ignore)
    assert not [name for name in ignore if set("*?[]:") & set(name)]  # names, no patterns


def test_sync_04_router_attention_and_head_stay_and_every_expert_layer_does_not(exported: Callable) -> None:
    ignore = exported("nvfp4").config["quantization_config"]["ignore"]
    for layer in range(CONFIG.num_layers):
        for module in ("mlp.gate", "self_attn.qkv_proj", "self_attn.o_proj"):
            assert excluded_by_vllm(f"model.layers.{layer}.{module}", ignore)
        assert not excluded_by_vllm(f"model.layers.{layer}.mlp.experts", ignore)
    assert excluded_by_vllm("lm_head", ignore) and excluded_by_vllm("model.embed_tokens", ignore)
    assert not [name for name in exported("nvfp4").files.declared if "mlp.gate." in name and "weight_" in name]


def test_no_name_of_one_layer_hits_another() -> None:
    """`model.layers.1` would also be layers 10 to 19."""
    deep = policy(config=replace(CONFIG, num_layers=12))
    ignore = quantization_config(deep, ExportSettings("nvfp4", "routed_experts:last:11"))["ignore"]  # pyright: ignore[reportOptionalSubscript]
    assert [layer for layer in range(12) if excluded_by_vllm(f"model.layers.{layer}.mlp.experts", ignore)] == [0]


def test_nvfp4_has_the_fields_of_modelopt(exported: Callable) -> None:
    made = exported("nvfp4")
    found = made.config["quantization_config"]
    assert {key: found[key] for key in ("quant_method", "quant_algo", "group_size")} == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
    }
    (group,) = found["config_groups"].values()
    assert group["input_activations"] == group["weights"] == {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    legacy = json.loads((made.path / "hf_quant_config.json").read_text())
    assert legacy["producer"]["name"] == "modelopt"
    assert set(legacy["quantization"]) == {"quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"}
    assert legacy["quantization"]["exclude_modules"] == found["ignore"]
    assert made.config["torch_dtype"] == "bfloat16" and made.config["architectures"] == ["Qwen3MoeForCausalLM"]


def test_exp_08_a_kv_cache_in_fp4_is_declared_on_request_only(exported: Callable) -> None:
    assert "kv_cache_scheme" not in exported("nvfp4").config["quantization_config"]
    declared = ExportSettings("nvfp4", declare_kv="nvfp4")
    assert quantization_config(policy(), declared)["kv_cache_scheme"] == {"num_bits": 4, "type": "float", "dynamic": False}  # pyright: ignore[reportOptionalSubscript]
    asked = [hf_quant_config(policy(), ExportSettings(declare_kv=kv))["quantization"]["kv_cache_quant_algo"] for kv in (None, "nvfp4")]
    assert asked == [None, "NVFP4"]


def test_mxfp4_has_the_fields_of_compressed_tensors(exported: Callable) -> None:
    made = exported("mxfp4")
    found = made.config["quantization_config"]
    assert (found["quant_method"], found["format"], found["quantization_status"]) == (
        "compressed-tensors",
        "mxfp4-pack-quantized",
        "compressed",
    )
    (group,) = found["config_groups"].values()
    kind = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    assert kind.items() <= group["weights"].items() and group["weights"]["dynamic"] is False
    assert kind.items() <= group["input_activations"].items() and group["input_activations"]["dynamic"] is True
    assert not (made.path / "hf_quant_config.json").exists()
    assert "quantization_config" not in exported("bf16").config


def test_a_scope_of_layers_leaves_the_others_in_bf16(exported: Callable) -> None:
    made = exported("nvfp4", scope="routed_experts:last_half")
    kinds = [made.files.declared[f"model.layers.{layer}.mlp.experts.0.up_proj.weight"][0] for layer in range(3)]
    assert kinds == ["BF16", "U8", "U8"] and made.result["quantized_layers"] == [1, 2]
    ignore = made.config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts" in ignore
    assert [excluded_by_vllm(f"model.layers.{layer}.mlp.experts", ignore) for layer in range(3)] == [True, False, False]


def test_exp_07_ckpt_12_a_tied_head_is_not_stored_but_excluded(tmp_path: Path) -> None:
    run = save(tmp_path / "run", random_params(TIED), multipliers(), TIED)
    export_checkpoint(run, tmp_path / "out", ExportSettings("nvfp4"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "lm_head" in config["quantization_config"]["ignore"]
    assert "lm_head.weight" not in ExportedFiles(tmp_path / "out").declared


def test_the_ids_that_end_an_answer_travel_with_a_built_in_tokenizer(exported: Callable) -> None:
    written = json.loads((exported("nvfp4").path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 128, "eos_token_id": [129], "pad_token_id": 130}


@pytest.mark.parametrize(("field", "size"), [("hidden_size", 63), ("hidden_size", 65), ("expert_hidden_size", 24)])
def test_sync_05_rows_that_are_no_whole_blocks_are_refused(field: str, size: int) -> None:
    odd = policy(config=replace(CONFIG, **{field: size}))
    with pytest.raises(UserError, match=rf"{field} {size} .* not a multiple of 16, .*--format bf16"):
        require_whole_blocks(odd, ExportSettings("nvfp4"))
    require_whole_blocks(odd, ExportSettings("bf16"))
    require_whole_blocks(policy(), ExportSettings("nvfp4"))


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"format": "int4"}, "--format int4 is unknown; write one of nvfp4, mxfp4, bf16"),
        ({"scope": "attention"}, "--scope attention cannot be exported: .* write routed_experts"),
        ({"declare_kv": "fp8"}, "--declare-kv fp8 is unknown; write nvfp4"),
        ({"format": "mxfp4", "declare_kv": "nvfp4"}, "--declare-kv nvfp4 needs --format nvfp4"),
    ],
)
def test_settings_that_cannot_hold_are_refused(choices: dict[str, str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        ExportSettings(**choices)


@pytest.mark.parametrize(
    ("scope", "line"),
    [("routed_experts:", "names no layers"), ("routed_experts:7", "the model has 3"), ("routed_experts:deep", "--scope is")],
)
def test_exp_13_a_scope_that_matches_nothing_is_refused(scope: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ExportSettings(scope=scope).quantized_layers(3)
    assert ExportSettings(scope="routed_experts:0,2").quantized_layers(3) == (0, 2)


def test_w4a16_is_never_taken_for_w4a4(exported: Callable) -> None:
    """Another name of the algorithm, no inputs in the groups, and no multiplier of an input that an engine could use."""
    made, w4a4 = exported("nvfp4", activations="bf16"), exported("nvfp4")
    config, legacy = made.config["quantization_config"], json.loads((made.path / "hf_quant_config.json").read_text())
    assert config["quant_algo"] == legacy["quantization"]["quant_algo"] == "W4A16_NVFP4" != w4a4.config["quantization_config"]["quant_algo"]
    assert config["config_groups"]["group_0"]["input_activations"] is None and made.result["activations"] == "bf16"
    assert w4a4.result["activations"] == "nvfp4"
    dropped = {name for name in w4a4.files.declared if name.endswith(".input_scale")}
    assert len(dropped) == 3 * CONFIG.num_experts * CONFIG.num_layers
    assert w4a4.files.declared == made.files.declared | {name: ("F32", ()) for name in dropped}
    group = quantization_config(policy(), ExportSettings("mxfp4", activations="bf16"))["config_groups"]["group_0"]  # pyright: ignore[reportOptionalSubscript]
    assert group["input_activations"] is None
    with pytest.raises(UserError, match="--activations nvfp4 does not go with --format mxfp4; write bf16, or leave it out"):
        ExportSettings("mxfp4", activations="nvfp4")
