"""Routes: global layer ids, missing rows, joining, agreement."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ragged_batches import random_trajectories, routes_from_ids

from trace_jax.metrics import finalize
from trace_jax.rollout import Routes, Trajectories
from trace_jax.rollout.padding import pad_batch
from trace_jax.rollout.routes import route_dtype
from trace_jax.train.batches import make_batch
from trace_jax.train.objective import _route_agreement


def routes_of(ids, layers, num_experts=8):
    return routes_from_ids(np.asarray(ids), layers, num_experts)


def test_route_01_layers_are_global_ids_when_the_first_layer_is_dense():
    # first_k_dense = 1 in a model of 4 layers: routed layers are 1, 2, 3, and row j of the middle axis is layer j + 1.
    ids = np.arange(2 * 3 * 2).reshape(2, 3, 2) % 8
    routes = routes_of(ids, [1, 2, 3])
    routes.validate(2)
    assert routes.moe_layer_ids.tolist() == [1, 2, 3]
    by_layer = dict(zip(routes.moe_layer_ids.tolist(), routes.routed_experts.swapaxes(0, 1), strict=True))
    np.testing.assert_array_equal(by_layer[1], ids[:, 0])
    assert 0 not in by_layer
    with pytest.raises(ValueError, match="moe_layer_ids"):
        Routes.concat([routes, routes_of(ids, [0, 1, 2])], [2, 2])


def test_route_03_environment_tokens_and_later_turns_keep_their_rows():
    # Two turns: sampled tokens around environment tokens. Rows stay aligned with tokens, those without a route are marked.
    ids = np.full((6, 1, 2), -1)
    ids[[1, 2, 4]] = [[[1, 2]], [[3, 4]], [[5, 6]]]
    batch = random_trajectories([6]).replace(routes=routes_of(ids, [0]), guidance=None)
    batch.validate()
    padded = pad_batch(batch, [0], 8).routed_experts
    np.testing.assert_array_equal(padded[0, :, 0, 0], [-1, 1, 3, -1, 5, -1, -1, -1])


def test_route_04_last_token_and_padding_choose_freely():
    batch = random_trajectories([3, 1])
    batch = batch.replace(routes=routes_of(np.zeros((4, 2, 2), int), [0, 1]))  # an engine that filled every row with expert 0
    with pytest.raises(ValueError, match="routes_valid: the last token"):
        batch.validate()
    padded = pad_batch(batch, [0, 1], 5, rows=3).routed_experts
    assert padded.dtype == np.int32
    np.testing.assert_array_equal(padded[0, :, 0, 0], [0, 0, -1, -1, -1])
    assert (padded[1:] == -1).all()


def test_route_05_missing_rows_are_marked():
    ids = np.zeros((4, 1, 2), int)
    ids[1] = -1
    routes = routes_of(ids, [0])
    joined = Routes.concat([routes, None], [4, 4])
    assert joined is not None
    np.testing.assert_array_equal(joined.routes_valid, [True, False, True, True, *[False] * 4])


@pytest.mark.parametrize("count", [4, 6])
def test_route_06_a_capture_of_other_length_raises(count):
    batch = random_trajectories([5])
    with pytest.raises(ValueError, match="^routed_experts: shape"):
        batch.replace(routes=routes_of(np.full((count, 1, 2), -1), [0])).validate()


@pytest.mark.usefixtures("unchecked")
def test_route_07_routes_of_other_tokens_raise():
    # Re-tokenized text has another length; rows of another sequence cannot be attached.
    batch = random_trajectories([5, 3])
    with pytest.raises(ValueError, match="^routed_experts"):
        batch.sequence(0).replace(routes=batch.sequence(1).routes).validate()
    with pytest.raises(ValueError, match="^routes_valid"):
        short = dataclasses.replace(batch.routes, routes_valid=batch.routes.routes_valid[:-1])
        batch.replace(routes=short).validate()


def test_route_08_bytes_per_token():
    assert route_dtype(256) is np.uint8 and route_dtype(257) is np.uint16
    # Qwen3.5-35B-A3B: 40 layers, 8 of 256 experts, one byte each.
    routes = routes_from_ids(np.zeros((3, 40, 8), int), range(40), 256)
    assert routes.routed_experts.nbytes / 3 == 320
    assert routes_from_ids(np.full((1, 1, 1), 511), [0], 512).routed_experts.dtype == np.uint16
    with pytest.raises(ValueError, match="num_experts"):
        route_dtype(0)


def test_route_09_agreement_compares_sets_and_nothing_replayed_is_not_agreement():
    batch = random_trajectories([4], guidance=None)

    def agreement(recorded):
        routes = routes_of([*recorded, [[-1, -1]]], [0])
        made, _ = make_batch(batch.replace(routes=routes), [[0]], 6, 1, num_layers=1)
        own = jnp.asarray([[[[1, 0]], [[2, 7]], [[4, 5]], [[0, 1]], [[0, 1]], [[0, 1]]]], jnp.int32)
        return finalize(_route_agreement(own, made))["router/agreement"]

    assert agreement([[[0, 1]], [[2, 3]], [[-1, -1]]]) == 0.5  # token 0 has the same set, in token 1 one expert differs
    assert agreement([[[0, 1]], [[7, 2]], [[5, 4]]]) == 1.0
    assert np.isnan(agreement([[[-1, -1]]] * 3))


def test_routes_of_different_width_are_not_joined():
    with pytest.raises(ValueError, match="experts per token"):
        Routes.concat([routes_of([[[0, 1]]], [0]), routes_of([[[0]]], [0])], [1, 1])
    with pytest.raises(ValueError, match="dtype"):
        Routes.concat([routes_of([[[0]]], [0]), routes_of([[[0]]], [0], 300)], [1, 1])


@pytest.mark.usefixtures("unchecked")
def test_validate_refuses_a_wrong_dtype_and_unordered_layers():
    good = routes_of([[[0, 1]]], [0])
    with pytest.raises(ValueError, match="^routed_experts: dtype"):
        dataclasses.replace(good, routed_experts=good.routed_experts.astype(np.int32)).validate(1)
    with pytest.raises(ValueError, match="^moe_layer_ids"):
        routes_of([[[0, 1], [2, 3]]], [2, 1]).validate(1)
    assert Routes.concat([None, None], [1, 1]) is None
    assert Trajectories.concat([random_trajectories([2], routes=False)] * 2).routes is None
