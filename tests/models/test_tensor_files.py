"""Files of a checkpoint: one or several, whole or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trace_jax.errors import UserError
from trace_jax.models.hf import load_hf_directory
from trace_jax.models.tensor_files import plan_shards

ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(make_checkpoint: Callable[..., Any], keep: int) -> None:
    checkpoint = make_checkpoint()
    file = checkpoint.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_hf_directory(checkpoint.path)


def test_no_weights(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*found pytorch_model\.bin"):
        load_hf_directory(checkpoint.path)


@pytest.fixture
def sharded(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint(save_options={"max_shard_bytes": 900})


def test_shards_read_like_one_file(sharded: Any) -> None:
    assert len(list(sharded.path.glob("model-*.safetensors"))) > 2
    jax.tree.map(np.testing.assert_array_equal, load_hf_directory(sharded.path).params, sharded.params)


def test_missing_shard(sharded: Any) -> None:
    shard = sorted(sharded.path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=rf"lacks {shard.name}, named in model\.safetensors\.index\.json"):
        load_hf_directory(sharded.path)


def test_missing_index(sharded: Any) -> None:
    (sharded.path / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"found model-00001-of"):
        load_hf_directory(sharded.path)


def test_stale_single_file_beside_an_index(sharded: Any) -> None:
    save_file({"a": np.ones(1, np.float32)}, sharded.path / "model.safetensors")
    with pytest.raises(UserError, match="both"):
        load_hf_directory(sharded.path)


def test_tensor_in_two_shards(sharded: Any) -> None:
    first, second = sorted(sharded.path.glob("model-*.safetensors"))[:2]
    name = sorted(load_file(first))[0]
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    with pytest.raises(UserError, match=rf"both hold {name}"):
        load_hf_directory(sharded.path)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 1}])
def test_index_without_a_map(sharded: Any, weight_map: Any) -> None:
    (sharded.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="weight_map is missing"):
        load_hf_directory(sharded.path)


def test_index_that_disagrees_with_the_shards(sharded: Any) -> None:
    path = sharded.path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["phantom"] = index["weight_map"].pop(ROUTER)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"disagree about {ROUTER}, phantom"):
        load_hf_directory(sharded.path)


def test_index_cannot_point_outside_the_directory(sharded: Any) -> None:
    path = sharded.path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][ROUTER] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks \.\./elsewhere\.safetensors"):
        load_hf_directory(sharded.path)


def test_shards_stay_below_the_limit_unless_one_tensor_exceeds_it() -> None:
    shapes = [("a", (4,)), ("b", (4,)), ("c", (100,)), ("d", (1,)), ("e", (7,))]
    assert plan_shards(shapes, itemsize=2, max_shard_bytes=16) == [["a", "b"], ["c"], ["d", "e"]]


def test_hf_07_shard_sizes_do_not_wrap_at_32_bits() -> None:
    shapes = [(name, (70_000, 70_000)) for name in "abc"]
    assert plan_shards(shapes, itemsize=2, max_shard_bytes=2 * 70_000**2 * 2) == [["a", "b"], ["c"]]
