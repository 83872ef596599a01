"""Export straight from a Hugging Face directory: the bytes of the way over an Orbax checkpoint, without holding the model."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_policy import random_params
from safetensors.numpy import load_file, save_file
from tiny_policy import CONFIG as SMALL_VOCABULARY

from rollout_bridge.export import ExportSettings, export_checkpoint
from trace_jax.errors import UserError
from trace_jax.models.hf import save_hf_directory
from trace_jax.models.tensor_files import TensorFiles
from trace_jax.train.hf_policy import HfParams
from trace_jax.train.import_checkpoint import import_hf_checkpoint

TASK = "reasoning_gym:chain_sum"
CONFIG = dataclasses.replace(SMALL_VOCABULARY, vocab_size=131)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    save_hf_directory(folder, "qwen3_moe", CONFIG, random_params(CONFIG))
    return folder


@pytest.fixture(scope="module")
def over_orbax(source: Path) -> Path:
    import_hf_checkpoint(source, source.parent / "orbax")
    return source.parent / "orbax"


def tensors(folder: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in load_file(folder / "model.safetensors").items()}


def test_bf16_round_trip_is_byte_identical(source: Path, over_orbax: Path, tmp_path: Path) -> None:
    for number, path in enumerate((source, over_orbax)):
        export_checkpoint(path, tmp_path / str(number), ExportSettings("bf16"), task=TASK)
        found = tensors(tmp_path / str(number))
        assert {name: found[name] for name in tensors(source)} == tensors(source)


def test_nvfp4_equals_the_way_over_orbax_and_is_verified(source: Path, over_orbax: Path, tmp_path: Path) -> None:
    files = []
    for number, path in enumerate((source, over_orbax)):
        result = export_checkpoint(path, tmp_path / str(number), ExportSettings("nvfp4"), task=TASK, verify=True)
        assert result["values_verified"] > 0 and result["calibrated_now"]
        with TensorFiles(tmp_path / str(number)) as opened:
            files.append({name: opened.stored(name).tobytes() for name in opened.names})
    assert files[0] == files[1]


def test_fused_experts_are_read_expert_by_expert(source: Path, tmp_path: Path) -> None:
    fused, held = tmp_path / "fused", load_file(source / "model.safetensors")
    fused.mkdir()
    (fused / "config.json").write_text((source / "config.json").read_text())
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(name: str, prefix: str = prefix) -> np.ndarray:
            return np.stack([held.pop(f"{prefix}.{expert}.{name}_proj.weight") for expert in range(CONFIG.num_experts)])

        held[f"{prefix}.gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], axis=1)
        held[f"{prefix}.down_proj"] = stack("down")
    save_file(held, fused / "model.safetensors")
    export_checkpoint(fused, tmp_path / "out", ExportSettings("bf16"), task=TASK)
    found = tensors(tmp_path / "out")
    assert {name: found[name] for name in tensors(source)} == tensors(source)


def test_no_more_than_one_layer_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    config = dataclasses.replace(CONFIG, num_layers=8)
    save_hf_directory(tmp_path / "model", "qwen3_moe", config, random_params(config))
    held, most, read = 0, 0, HfParams.read

    def let_go(count: int) -> None:
        nonlocal held
        held -= count

    def watched(params: HfParams, *place: Any) -> np.ndarray:
        nonlocal held, most
        array = read(params, *place)
        held += array.nbytes
        most = max(most, held)
        weakref.finalize(array, let_go, array.nbytes)
        return array

    monkeypatch.setattr(HfParams, "read", watched)
    export_checkpoint(tmp_path / "model", tmp_path / "out", ExportSettings("bf16"))
    layer = 4 * 3 * config.num_experts * config.hidden_size * config.expert_hidden_size
    assert layer <= most <= layer + 4 * config.vocab_size * config.hidden_size


def test_a_task_is_asked_for(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was never calibrated; name a task .*--task TASK"):
        export_checkpoint(source, tmp_path / "out", ExportSettings("nvfp4"))
    assert not (tmp_path / "out").exists()
