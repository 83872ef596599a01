"""Exports of every family: verified tensor by tensor where the files can be written, refused by name where they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exported_policy import multipliers, random_params, save
from model_families import FAMILIES, config_of

from rollout_bridge.export import ExportSettings, export_checkpoint
from rollout_bridge.export.decode import ExportedFiles
from trace_jax.errors import UserError
from trace_jax.models.hf import load_hf_directory
from trace_jax.models.key_map import FLOAT32_LEAVES
from trace_jax.models.registry import ModelConfig, key_map

REFUSED = {"gpt_oss": "its files hold the experts of a layer in one tensor"}
DENSE = ("llama", "qwen3")


def stored(folder: Path, name: str) -> tuple[ModelConfig, Path]:
    config = config_of(name, vocab_size=131)
    scales = {site: values for site, values in multipliers(config.num_layers).items() if config.layers_of(site)}
    return config, save(folder / "run", random_params(config), scales, config)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*REFUSED, *DENSE)])
def test_nvfp4_is_what_the_trainer_computes_with(tmp_path: Path, name: str) -> None:
    config, run = stored(tmp_path, name)
    result = export_checkpoint(run, tmp_path / "out", ExportSettings("nvfp4"), verify=True)
    assert result["values_verified"] > result["tensors"]
    declared = ExportedFiles(tmp_path / "out").declared
    for entry in key_map(name, config):
        expected = "U8" if entry.is_expert else "F32" if entry.path[-1] in FLOAT32_LEAVES else "BF16"
        assert declared[entry.name][0] == expected, entry.name
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(module.endswith(("mlp.gate", "block_sparse_moe.gate")) for module in ignored)
    assert not any(".experts" in module and "shared" not in module for module in ignored)
    if not config.layers_of("k"):
        assert not any(tensor.endswith((".k_scale", ".v_scale")) for tensor in declared)
    # Decoded again: modelopt's NVFP4 experts are read as the weights that they stand for.
    found = load_hf_directory(tmp_path / "out")
    assert found.family == name and found.config == config


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_family_is_exported_in_bf16_only(tmp_path: Path, name: str) -> None:
    config, run = stored(tmp_path, name)
    with pytest.raises(UserError, match=f"{name} has no routed experts, so nvfp4 would quantize nothing; export with --format bf16"):
        export_checkpoint(run, tmp_path / "out", ExportSettings("nvfp4"))
    export_checkpoint(run, tmp_path / "out", ExportSettings("bf16"), verify=True)
    found = load_hf_directory(tmp_path / "out")
    assert found.config == config
    expected = random_params(config)["groups"][0]["mlp"]["up"].astype("bfloat16").astype(np.float32)
    np.testing.assert_array_equal(found.params["groups"][0]["mlp"]["up"], expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, name: str) -> None:
    _, run = stored(tmp_path, name)
    with pytest.raises(UserError, match=f"{name} cannot be exported: {REFUSED[name]}"):
        export_checkpoint(run, tmp_path / "out", ExportSettings("nvfp4"))
    assert not (tmp_path / "out").exists()
