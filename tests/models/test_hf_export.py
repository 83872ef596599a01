"""Writing Hugging Face directories: byte-identical round trips, shards, and nothing half-written."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from trace_jax.errors import UserError
from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.hf_tensors import to_hf_tensors
from trace_jax.models.key_map import file_shapes
from trace_jax.models.qwen3_moe.params import key_map


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [900, 10**9])
def test_exp_07_round_trip_is_byte_identical(
    tmp_path: Path, make_checkpoint: Callable[..., Any], tie_embeddings: bool, max_shard_bytes: int
) -> None:
    checkpoint = make_checkpoint(save_options={"max_shard_bytes": max_shard_bytes}, tie_embeddings=tie_embeddings, attention_bias=True)
    family, config, params = load_hf_directory(checkpoint.path)
    save_hf_directory(tmp_path / "again", family, config, params, max_shard_bytes=max_shard_bytes)
    first, second = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (checkpoint.path, tmp_path / "again"))
    assert first == second


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_ckpt_12_tied_embeddings_are_stored_once(make_checkpoint: Callable[..., Any], tie_embeddings: bool) -> None:
    checkpoint = make_checkpoint(tie_embeddings=tie_embeddings)
    assert json.loads((checkpoint.path / "config.json").read_text())["tie_word_embeddings"] is tie_embeddings
    assert ("lm_head.weight" in checkpoint.tensors()) is not tie_embeddings


@pytest.mark.parametrize("dtype, numpy_dtype", [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)])
def test_values_are_rounded_to_nearest_even(make_checkpoint: Callable[..., Any], tmp_path: Path, dtype: str, numpy_dtype: Any) -> None:
    checkpoint = make_checkpoint()
    params = jax.tree.map(lambda x: jnp.asarray(x) * jnp.float32(1.0 / 3.0), checkpoint.params)
    save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, params, dtype=dtype)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    for name, value in to_hf_tensors(key_map(checkpoint.config), params):
        assert stored[name].dtype == numpy_dtype
        np.testing.assert_array_equal(stored[name], value.astype(numpy_dtype))


def test_file_carries_the_format_that_transformers_asks_for(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    with safe_open(checkpoint.path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == file_shapes(key_map(checkpoint.config))


def test_index_lists_every_tensor_and_the_size(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(save_options={"max_shard_bytes": 900})
    index = json.loads((checkpoint.path / "model.safetensors.index.json").read_text())
    shapes = file_shapes(key_map(checkpoint.config))
    assert set(index["weight_map"]) == set(shapes)
    assert index["metadata"]["total_size"] == 2 * sum(np.prod(shape) for shape in shapes.values())
    assert set(index["weight_map"].values()) == {file.name for file in checkpoint.path.glob("model-*.safetensors")}


def test_tokenizer_and_generation_files_are_carried(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "notes.txt", "config.json"):
        (source / name).write_text(f"{{}} {name}")
    save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, checkpoint.params, tokenizer_dir=source)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"tokenizer.json", "generation_config.json", "config.json", "model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{} tokenizer.json"
    assert load_hf_directory(tmp_path / "out").config == checkpoint.config


def left_behind(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_tokenizer_directory_without_files_is_refused(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    with pytest.raises(UserError, match="holds no tokenizer or generation file"):
        save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, checkpoint.params, tokenizer_dir=tmp_path)
    assert left_behind(tmp_path) == {"checkpoint"}


def test_existing_target_is_not_touched(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    before = (checkpoint.path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        save_hf_directory(checkpoint.path, "qwen3_moe", checkpoint.config, checkpoint.params, dtype="float32")
    assert (checkpoint.path / "model.safetensors").read_bytes() == before
    assert left_behind(tmp_path) == {"checkpoint"}


def test_an_empty_directory_and_missing_parents_are_fine(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        save_hf_directory(target, "qwen3_moe", checkpoint.config, checkpoint.params)
        assert load_hf_directory(target).config == checkpoint.config


@pytest.mark.parametrize("bad, dtype", [(np.nan, "bfloat16"), (np.inf, "float32"), (3.4e38, "bfloat16"), (1e6, "float16")])
def test_values_that_are_not_finite_are_refused_and_nothing_stays(
    make_checkpoint: Callable[..., Any], tmp_path: Path, bad: float, dtype: str
) -> None:
    checkpoint = make_checkpoint()
    checkpoint.params["groups"][0]["router"][1, 0, 0] = bad
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.gate\.weight holds NaN, infinity"):
        save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, checkpoint.params, dtype=dtype)
    assert left_behind(tmp_path) == {"checkpoint"}


def test_parameters_of_another_config_are_refused(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint, biased = make_checkpoint(), make_checkpoint("biased", attention_bias=True)
    with pytest.raises(UserError, match=r"do not fit the model config: groups\.0\.attention\.k_bias"):
        save_hf_directory(tmp_path / "out", "qwen3_moe", biased.config, checkpoint.params)
    assert left_behind(tmp_path) == {"checkpoint", "biased"}


def test_unknown_dtype_is_refused(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    with pytest.raises(UserError, match="int8 cannot be stored; write one of bfloat16"):
        save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, checkpoint.params, dtype=np.int8)


def test_full_disk_is_one_line_and_leaves_nothing(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*out: .*free space") as caught:
            save_hf_directory(tmp_path / "out", "qwen3_moe", checkpoint.config, checkpoint.params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path) == {"checkpoint"}
