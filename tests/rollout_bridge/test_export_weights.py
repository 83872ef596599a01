"""The bytes of exported weights: those of the NumPy oracle, of the trainer and of a weight update; every expert whole and finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exported_policy import SHARD_BYTES, multipliers
from safetensors import safe_open
from tiny_policy import CONFIG, PLANS, policy

from pallas_kernels import MXFP4, NVFP4, oracle
from rollout_bridge.export.experts import trainer_block
from trace_jax.layers.experts import ExpertWeights
from trace_jax.models.hf import load_hf_directory
from trace_jax.models.registry import Params, key_map
from trace_jax.models.tensor_files import TensorFiles
from trace_jax.rollout.weight_sync import layer_updates

PROJECTIONS = ("gate", "up", "down")


def name_of(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"


def every_expert() -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(CONFIG.num_layers) for expert in range(CONFIG.num_experts)]


def bf16_master(masters: Params, layer: int, expert: int, projection: str) -> np.ndarray:
    return masters["groups"][0]["experts"][projection][layer, expert].astype(ml_dtypes.bfloat16)


def test_exp_19_nvfp4_codes_scales_and_multipliers_are_those_of_the_oracle(exported: Callable, masters: Params) -> None:
    files = exported("nvfp4").files
    for layer, expert in every_expert():
        weights = {name: bf16_master(masters, layer, expert, name) for name in PROJECTIONS}
        amax = {name: np.abs(weight).max().astype(np.float32) for name, weight in weights.items()}
        amax["gate"] = amax["up"] = max(amax["gate"], amax["up"])
        for name, weight in weights.items():
            multiplier = oracle.decode_multiplier(amax[name])
            expected = oracle.quantize(weight, NVFP4, multiplier)
            module = name_of(layer, expert, name)
            np.testing.assert_array_equal(files.read(f"{module}.weight"), expected.codes)
            np.testing.assert_array_equal(files.read(f"{module}.weight_scale"), expected.scales)
            assert files.read(f"{module}.weight_scale_2") == multiplier
            assert np.isfinite(multiplier) and multiplier > 0


def test_mxfp4_codes_and_scales_are_those_of_the_oracle(exported: Callable, masters: Params) -> None:
    files = exported("mxfp4").files
    for layer, expert in every_expert():
        for name in PROJECTIONS:
            expected = oracle.quantize(bf16_master(masters, layer, expert, name), MXFP4)
            module = name_of(layer, expert, name)
            np.testing.assert_array_equal(files.read(f"{module}.weight_packed"), expected.codes)
            np.testing.assert_array_equal(files.read(f"{module}.weight_scale"), expected.scales)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_exp_20_decoded_weights_are_the_trainers(exported: Callable, masters: Params, fmt: str) -> None:
    files = exported(fmt).files
    layer = ExpertWeights(**{name: jnp.asarray(w[0]) for name, w in masters["groups"][0]["experts"].items()})
    for name, trained in trainer_block(layer, fmt=fmt)._asdict().items():
        for expert in range(CONFIG.num_experts):
            found = files.decode(name_of(0, expert, name))
            np.testing.assert_array_equal(found.view(np.uint16), np.asarray(trained[expert]).astype(ml_dtypes.bfloat16).view(np.uint16))


def test_a_weight_update_of_the_running_engine_has_the_same_bytes(exported: Callable, masters: Params) -> None:
    files = exported("nvfp4").files
    sent = {
        name: np.asarray(value)
        for update in layer_updates(policy(), PLANS["nvfp4"], masters, multipliers())
        for name, value in update.tensors.items()
    }
    for layer, expert in every_expert():
        for name in PROJECTIONS:
            for part in ("weight", "weight_scale", "weight_scale_2"):
                stacked = sent[f"model.layers.{layer}.mlp.experts.{name}_proj.{part}"]
                np.testing.assert_array_equal(files.read(f"{name_of(layer, expert, name)}.{part}"), stacked[expert])
        np.testing.assert_array_equal(
            files.read(f"{name_of(layer, expert, 'gate')}.input_scale"), sent[f"model.layers.{layer}.mlp.experts.input_scale"]
        )


def test_exp_02_exp_03_gate_and_up_share_a_multiplier_also_without_traffic(exported: Callable, masters: Params) -> None:
    files = exported("nvfp4").files
    alone = 0
    for layer, expert in every_expert():
        gate, up = (files.read(f"{name_of(layer, expert, name)}.weight_scale_2") for name in ("gate", "up"))
        assert gate == up
        amax = [np.abs(bf16_master(masters, layer, expert, name)).max().astype(np.float32) for name in ("gate", "up")]
        alone += oracle.decode_multiplier(amax[0]) != oracle.decode_multiplier(amax[1])
    assert alone  # without sharing, some pair would differ


def test_a_dead_expert_is_whole_finite_and_zero(exported: Callable) -> None:
    files = exported("nvfp4").files
    for name in PROJECTIONS:
        module = name_of(1, 2, name)
        assert not files.read(f"{module}.weight").any() and not files.read(f"{module}.weight_scale").any()
        assert files.read(f"{module}.weight_scale_2") > 0 and files.read(f"{module}.input_scale") > 0
        assert not files.decode(module).any()


def test_exp_09_exp_12_a_huge_block_among_zero_blocks_stays(exported: Callable) -> None:
    for fmt in ("nvfp4", "mxfp4"):
        decoded = exported(fmt).files.decode(name_of(2, 0, "down")).astype(np.float64)
        np.testing.assert_allclose(decoded[0, :16], 1e30, rtol=0.25)
        decoded[0, :16] = 0
        assert not decoded.any()


def test_exp_17_exp_21_small_blocks_are_not_zeros(exported: Callable, masters: Params) -> None:
    files = exported("nvfp4").files
    scales = files.read(f"{name_of(2, 4, 'gate')}.weight_scale")[:4, 0]
    assert set(scales) <= {1, 2, 3, 4, 5, 6, 7} and len(set(scales)) >= 3  # subnormal E4M3
    small = files.decode(name_of(0, 1, "gate"))[0, :16].astype(np.float64)
    assert small.any() and np.abs(small - masters["groups"][0]["experts"]["gate"][0, 1, 0, :16]).max() < 1e-5


def test_every_scale_byte_is_a_scale(exported: Callable) -> None:
    for fmt, largest in (("nvfp4", 0x7E), ("mxfp4", 0xFE)):
        files = exported(fmt).files
        scales = [files.read(name) for name in files.declared if name.endswith(".weight_scale")]
        assert len(scales) == 3 * len(every_expert()) and max(int(values.max()) for values in scales) <= largest


def test_everything_else_is_the_master_in_bf16(exported: Callable, masters: Params) -> None:
    for fmt in ("nvfp4", "mxfp4", "bf16"):
        files = exported(fmt).files
        for entry in key_map("qwen3_moe", CONFIG):
            if len(entry.position) == 2 and fmt != "bf16":
                continue
            master: Any = masters
            for key in entry.path:
                master = master[key]
            expected = np.asarray(master)[entry.position].astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(files.read(entry.name).view(np.uint16), expected.view(np.uint16))


def test_bf16_is_a_checkpoint_that_import_reads(exported: Callable, masters: Params) -> None:
    family, config, loaded = load_hf_directory(exported("bf16").path)
    assert (family, config) == ("qwen3_moe", CONFIG)
    experts = loaded["groups"][0]["experts"]["up"]
    np.testing.assert_array_equal(experts, masters["groups"][0]["experts"]["up"].astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_import_reads_an_fp4_export_as_the_weights_that_it_decodes_to(exported: Callable, fmt: str) -> None:
    export = exported(fmt)
    imported = load_hf_directory(export.path).params["groups"][0]["experts"]
    for layer, expert in every_expert():
        for projection in ("gate", "up", "down"):
            decoded = export.files.decode(name_of(layer, expert, projection).removesuffix(".weight"))
            np.testing.assert_array_equal(imported[projection][layer, expert].astype(decoded.dtype), decoded)


def test_input_scales_are_the_checkpoints_multipliers(exported: Callable) -> None:
    files, scales = exported("nvfp4").files, multipliers()
    for layer, expert in every_expert():
        for name, site in (("gate", "expert_input"), ("up", "expert_input"), ("down", "down_input")):
            assert files.read(f"{name_of(layer, expert, name)}.input_scale") == scales[site][layer]
    assert all(scales["expert_input"] != scales["down_input"]) and len(set(map(float, scales["expert_input"]))) == 3  # a mix-up would show


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_kv_scales_are_always_written_and_bf16_holds_them(exported: Callable, fmt: str) -> None:
    files, scales = exported(fmt).files, multipliers()
    for layer in range(CONFIG.num_layers):
        for site in "kv":
            value = files.read(f"model.layers.{layer}.self_attn.{site}_proj.{site}_scale")
            assert value == scales[site][layer] == value.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_exp_05_exp_06_shapes_and_types_are_those_that_vllm_expects(exported: Callable) -> None:
    declared = exported("nvfp4").files.declared
    widths = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    for layer, expert in every_expert():
        for name, (out, size) in widths.items():
            module = name_of(layer, expert, name)
            parts = {key.removeprefix(f"{module}."): value for key, value in declared.items() if key.startswith(f"{module}.")}
            assert parts == {
                "weight": ("U8", (out, size // 2)),
                "weight_scale": ("F8_E4M3", (out, size // 16)),
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            }
    assert not [name for name in declared if "._" in name]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "bf16"])
def test_the_files_are_what_other_readers_open(exported: Callable, fmt: str) -> None:
    made = exported(fmt)
    assert made.result["files"] == len(list(made.path.glob("*.safetensors"))) > 2
    assert max(file.stat().st_size for file in made.path.glob("*.safetensors")) < SHARD_BYTES + 40_000
    with TensorFiles(made.path) as files:
        assert files.names == set(made.files.declared)
    for path in made.path.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            plain = [name for name in file.keys() if not name.endswith(".weight_scale")]
            assert all(np.isfinite(np.asarray(file.get_tensor(name), np.float32)).all() for name in plain)
