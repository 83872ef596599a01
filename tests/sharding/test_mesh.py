"""What is divided how, and what is refused; none of it needs several devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tiny_policy as tiny
from jax.sharding import PartitionSpec as P
from model_families import FAMILIES, config_of

from trace_jax.errors import UserError
from trace_jax.models.registry import param_shapes
from trace_jax.sharding.axes import constrain, per_shard
from trace_jax.sharding.mesh import device_mesh, mesh_of
from trace_jax.sharding.rules import check_heads_and_blocks, specs
from trace_jax.train.objective import ObjectiveSpec, objective_and_gradient

ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
NVFP4 = ("nvfp4", "nvfp4")


def devices(count: int) -> Any:
    """As many times the only device: enough for what is refused."""
    return jax.devices() * count


def test_one_device_needs_no_mesh():
    assert device_mesh(ONE) is None and device_mesh(ONE | {"data": -1}, devices(1)) is None
    assert mesh_of(tiny.params()) is None


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"data": 4}, "take 4 devices, but 8 are there"),
        ({"data": 16}, "take 16 devices, but 8 are there"),
        ({"expert": 3, "data": -1}, "leave no whole number of the 8 devices for mesh.data"),
    ],
)
def test_sizes_that_are_not_those_of_the_devices(sizes, part):
    with pytest.raises(UserError, match=part) as caught:
        device_mesh(ONE | sizes, devices(8))
    assert "\n" not in str(caught.value) and "; write " in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "change", "formats", "part"),
    [
        (4, {}, NVFP4, "does not divide the model's num_kv_heads=2"),
        (8, {"num_kv_heads": 4}, NVFP4, "does not divide the model's num_heads=4"),
        (2, {"expert_hidden_size": 48}, NVFP4, "the 48 hidden columns .* are not 2 shares of whole blocks of 16"),
        (2, {"expert_hidden_size": 32}, ("mxfp4", "mxfp4"), "2 shares of whole blocks of 32"),
        (2, {"expert_hidden_size": 32}, ("nvfp4", "mxfp4"), "2 shares of whole blocks of 32"),
        (2, {"expert_hidden_size": 192}, ("fp8", "bf16"), "2 shares of whole blocks of 128"),
        (2, {"expert_hidden_size": 64}, ("fp8", "bf16"), "2 shares of whole blocks of 64"),
    ],
)
def test_no_head_and_no_block_lies_on_two_devices(tensor, change, formats, part):
    with pytest.raises(UserError, match=part) as caught:
        check_heads_and_blocks(ONE | {"tensor": tensor}, replace(tiny.CONFIG, **change), formats)
    assert "\n" not in str(caught.value) and "; write " in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "width", "formats"), [(1, 20, NVFP4), (2, 32, NVFP4), (2, 30, ("bf16", "bf16")), (2, 64, ("mxfp4", "nvfp4"))]
)
def test_whole_blocks_are_divided(tensor, width, formats):
    check_heads_and_blocks(ONE | {"tensor": tensor}, replace(tiny.CONFIG, expert_hidden_size=width), formats)


def test_every_parameter_and_moment_has_its_place():
    sizes = {"data": 2, "fsdp": 2, "expert": 2, "tensor": 1}
    shapes = param_shapes("qwen3_moe", tiny.BIASED)
    found = specs(shapes, sizes)
    layer = found["groups"][0]
    assert layer["experts"]["gate"] == P(None, "expert", ("tensor", "fsdp"), None)
    assert layer["experts"]["down"] == P(None, "expert", "fsdp", "tensor")
    assert layer["attention"]["q_proj"] == P(None, "tensor", "fsdp") and layer["attention"]["o_proj"] == P(None, "fsdp", "tensor")
    assert layer["router"] == P(None, None, "fsdp") and found["final_norm"] == P()
    moments = specs(jax.eval_shape(optax.adamw(1e-3).init, shapes), sizes)[0]
    assert moments.mu == found and moments.nu == found and moments.count == P()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_rules(family):
    found = specs(param_shapes(family, config_of(family)), ONE | {"fsdp": 2})
    divided = [spec for spec in jax.tree.leaves(found, is_leaf=lambda leaf: isinstance(leaf, P)) if "fsdp" in str(spec)]
    assert len(divided) > 5


def test_a_vocabulary_of_any_size():
    shapes = param_shapes("qwen3_moe", tiny.CONFIG)
    assert specs(shapes, ONE | {"tensor": 2})["embed"]["weight"] == P(None, "fsdp")  # 97 rows stay whole
    assert specs(param_shapes("qwen3_moe", replace(tiny.CONFIG, vocab_size=98)), ONE)["embed"]["weight"] == P("tensor", "fsdp")


@pytest.mark.parametrize(
    ("tree", "sizes", "part"),
    [
        (param_shapes("qwen3_moe", tiny.CONFIG), {"expert": 4}, r"mesh.expert=4 cannot divide 6, axis 1 of groups/experts/\w+ \(3, 6, "),
        (param_shapes("qwen3_moe", tiny.CONFIG), {"fsdp": 128}, "mesh.fsdp=128 cannot divide 64"),
        ({"groups": {0: {"memory": jnp.ones((2, 4))}}}, {}, "parameter groups/memory has no sharding rule"),
    ],
)
def test_what_cannot_be_divided_is_named(tree, sizes, part):
    with pytest.raises(UserError, match=part) as caught:
        specs(tree, ONE | sizes)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_without_a_mesh_nothing_is_said_about_devices():
    """The program of one device is the one it was before there were meshes."""
    assert constrain(3, "data") == 3 and per_shard(constrain, None, None) is constrain
    answers = tiny.engine(tiny.PLANS["nvfp4"])
    answers.submit(tiny.requests())
    spec = ObjectiveSpec(tiny.policy(), tiny.guided(tiny.PLANS["nvfp4"]))
    batch = tiny.batch_of(answers.poll())
    jaxpr = str(objective_and_gradient.trace(tiny.params(), tiny.multipliers(), batch, jnp.float32(1), spec=spec).jaxpr)
    assert len(jaxpr) > 10_000 and not [name for name in ("sharding_constraint", "shard_map", "psum") if name in jaxpr]
