"""The router, free and replayed, and the two implementations of the experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.layers import partial_sums
from trace_jax.layers.experts import DENSE_PARAMETERS_LIMIT, ExpertWeights, apply_experts, choose_implementation
from trace_jax.layers.router import route, route_by_biased_sigmoid

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)) * 2, jnp.float32)


def softmax(x):
    weights = np.exp(np.asarray(x, np.float64))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("normalised", [True, False])
def test_free_routing_takes_the_most_probable_experts(normalised):
    ids, weights, own = route(LOGITS, 2, normalised)
    expected = np.argsort(-np.asarray(LOGITS), axis=-1)[:, :2]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(own, expected)
    chosen = np.take_along_axis(softmax(LOGITS), expected, axis=-1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True) if normalised else chosen, rtol=1e-5)
    assert ids.dtype == jnp.int32


@pytest.mark.parametrize("normalised", [True, False])
def test_replayed_rows_use_the_recorded_experts_with_weights_of_the_full_softmax(normalised):
    replay = jnp.asarray([[4, 1]] * 5, jnp.int32)
    ids, weights, own = route(LOGITS, 2, normalised, replay)
    np.testing.assert_array_equal(ids, replay)
    np.testing.assert_array_equal(own, route(LOGITS, 2, normalised)[0])
    chosen = softmax(LOGITS)[:, [4, 1]]
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True) if normalised else chosen, rtol=1e-5)


def test_route_04_minus_one_is_free_and_never_expert_zero():
    free_ids, free_weights, _ = route(LOGITS, 2, True)
    replay = jnp.asarray([[4, 1], [-1, -1], [3, -1], [0, 5], [-1, -1]], jnp.int32)
    ids, weights, _ = route(LOGITS, 2, True, replay)
    for row in (1, 2, 4):
        np.testing.assert_array_equal(ids[row], free_ids[row])
        np.testing.assert_array_equal(weights[row], free_weights[row])
    np.testing.assert_array_equal(ids[jnp.asarray([0, 3])], [[4, 1], [0, 5]])


def test_the_gradient_reaches_the_router_through_replayed_experts():
    def loss(logits, replay):
        _, weights, _ = route(logits, 2, True, replay)
        return jnp.sum(weights * jnp.asarray([[1.0, -1.0]], jnp.float32))

    replay = jnp.asarray([[4, 1]] * 5, jnp.int32)
    gradient = np.asarray(jax.grad(loss)(LOGITS, replay))
    probability = softmax(LOGITS)[:, [4, 1]]
    share = probability / probability.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient[:, 4], 2 * share[:, 0] * share[:, 1], rtol=1e-4)
    np.testing.assert_allclose(gradient[:, 1], -gradient[:, 4], rtol=1e-5)
    assert not np.any(gradient[:, [0, 2, 3, 5]] > 1e-7)


def experts(dtype=jnp.float32, count=4, width=12, hidden=6):
    rng = np.random.default_rng(1)
    gate, up = (jnp.asarray(rng.normal(size=(count, hidden, width)), dtype) for _ in range(2))
    return ExpertWeights(gate, up, jnp.asarray(rng.normal(size=(count, width, hidden)), dtype))


def inputs(tokens=7, width=12, count=4):
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(count)[:2] for _ in range(tokens)]).astype(np.int32)
    return jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32), jnp.asarray(ids), jnp.asarray(rng.random((tokens, 2)), jnp.float32)


def loop(x, ids, mixing, weights, quantize_hidden=lambda h: h):
    """One token and one expert at a time."""
    x, mixing = np.asarray(x, np.float64), np.asarray(mixing, np.float64)
    gate, up, down = (np.asarray(w, np.float64) for w in weights)
    out = np.zeros_like(x)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(np.asarray(ids)[token]):
            g, u = gate[expert] @ x[token], up[expert] @ x[token]
            out[token] += mixing[token, slot] * (down[expert] @ quantize_hidden(g / (1 + np.exp(-g)) * u))
    return out


@pytest.mark.parametrize("implementation", ["dense", "ragged"])
def test_experts_equal_a_loop(implementation):
    x, ids, mixing = inputs()
    result = apply_experts(x, ids, mixing, experts(), lambda h: h, implementation)
    np.testing.assert_allclose(result, loop(x, ids, mixing, experts()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["dense", "ragged"])
def test_the_hidden_rounding_is_applied_before_the_down_projection(implementation):
    x, ids, mixing = inputs()
    result = apply_experts(x, ids, mixing, experts(), jnp.trunc, implementation)
    np.testing.assert_allclose(result, loop(x, ids, mixing, experts(), np.trunc), rtol=1e-4, atol=1e-4)


def test_dense_and_ragged_agree_with_their_gradients():
    x, ids, mixing = inputs()

    def loss(x, mixing, weights, implementation):
        return jnp.sum(jnp.sin(apply_experts(x, ids, mixing, weights, lambda h: h, implementation)))

    both = [jax.grad(loss, argnums=(0, 1, 2))(x, mixing, experts(), name) for name in ("dense", "ragged")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *both)


def test_an_expert_without_tokens_and_an_expert_with_all_tokens():
    x, _, mixing = inputs()
    ids = jnp.asarray([[2, 0]] * 7, jnp.int32)
    for implementation in ("dense", "ragged"):
        result = apply_experts(x, ids, mixing, experts(), lambda h: h, implementation)
        np.testing.assert_allclose(result, loop(x, ids, mixing, experts()), rtol=1e-4, atol=1e-4)


def test_bfloat16_experts_agree_within_rounding():
    x, ids, mixing = inputs()
    weights = experts(jnp.bfloat16)
    expected = loop(x.astype(jnp.bfloat16), ids, mixing, weights)
    for implementation in ("dense", "ragged"):
        result = apply_experts(x.astype(jnp.bfloat16), ids, mixing, weights, lambda h: h, implementation)
        assert result.dtype == jnp.bfloat16
        assert np.max(np.abs(np.asarray(result, np.float64) - expected)) < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("implementation", ["dense", "ragged"])
def test_shares_of_experts_are_rounded_and_added(implementation):
    """Two devices with half of the experts each: every token's sum is that of two rounded sums."""
    x, _, mixing = inputs()
    ids = jnp.asarray([[0, experts().gate.shape[0] - 1]] * x.shape[0], jnp.int32)  # one expert on each device
    weights, narrow = experts(jnp.bfloat16), x.astype(jnp.bfloat16)
    both = apply_experts(narrow, ids, mixing, weights, lambda h: h, implementation, 2)
    alone = [apply_experts(narrow, ids, mixing.at[:, 1 - slot].set(0.0), weights, lambda h: h, implementation) for slot in (0, 1)]
    np.testing.assert_array_equal(np.asarray(both), np.asarray(alone[0] + alone[1]))
    whole = apply_experts(narrow, ids, mixing, weights, lambda h: h, implementation)
    assert 0 < np.abs(np.asarray(whole, np.float32) - np.asarray(both, np.float32)).max() < 0.02 * np.abs(np.asarray(whole)).max()
    wide = [apply_experts(x, ids, mixing, experts(), lambda h: h, implementation, parts) for parts in (1, 2)]
    np.testing.assert_allclose(*wide, rtol=1e-5, atol=1e-5)


def test_a_matrix_product_in_shares():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((5, 12), (12, 7)))
    expected = (x[:, :4] @ weight[:4] + x[:, 4:8] @ weight[4:8]) + x[:, 8:] @ weight[8:]
    np.testing.assert_array_equal(np.asarray(partial_sums.matmul(x, weight, 3)), np.asarray(expected))
    with pytest.raises(ValueError, match="12 columns cannot be cut into 5"):
        partial_sums.matmul(x, weight, 5)


def test_auto_takes_dense_for_small_layers_only():
    assert choose_implementation("auto", 8, 64, 32) == "dense"
    assert choose_implementation("auto", 128, 2048, 768) == "ragged"
    assert choose_implementation("ragged", 8, 64, 32) == "ragged"
    assert choose_implementation("auto", 1, DENSE_PARAMETERS_LIMIT // 3 + 1, 1) == "ragged"


@pytest.mark.parametrize(("groups", "kept_groups"), [(1, 1), (3, 2), (3, 1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_biased_sigmoid_router_ranks_with_the_bias_and_weighs_without_it(groups: int, kept_groups: int, normalised: bool):
    """A loop over tokens, groups and experts."""
    bias = jnp.asarray([0.0, 0.6, -0.4, 0.9, 0.1, -0.7], jnp.float32)
    options = {"groups": groups, "kept_groups": kept_groups, "norm_topk_prob": normalised, "scale": 2.5}
    ids, weights, own = route_by_biased_sigmoid(LOGITS, bias, 2, **options)
    for token, logits in enumerate(np.asarray(LOGITS, np.float64)):
        scores = 1 / (1 + np.exp(-logits))
        ranked, size = scores + np.asarray(bias), 6 // groups
        best_two = [np.sort(ranked[group * size : (group + 1) * size])[-2:].sum() for group in range(groups)]
        kept = np.argsort(best_two)[::-1][:kept_groups]
        allowed = [expert for expert in np.argsort(-ranked) if expert // size in kept][:2]
        expected = scores[allowed] / (scores[allowed].sum() if normalised else 1.0) * 2.5
        assert ids[token].tolist() == own[token].tolist() == allowed
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)
    replay = jnp.asarray([[4, 0]] * 4 + [[-1, -1]], jnp.int32)
    used, replayed, chosen = route_by_biased_sigmoid(LOGITS, bias, 2, **options, replay=replay)
    np.testing.assert_array_equal(used, [*replay[:4].tolist(), own[4].tolist()])
    np.testing.assert_array_equal(chosen, own)
    assert not np.allclose(replayed[:4], weights[:4])


def test_no_gradient_reaches_the_bias_that_ranks():
    def loss(logits, bias):
        weights = route_by_biased_sigmoid(logits, bias, 2, groups=3, kept_groups=2, norm_topk_prob=True, scale=1.0)[1]
        return jnp.sum(jnp.square(weights))

    logits, bias = jax.grad(loss, argnums=(0, 1))(LOGITS, jnp.linspace(-1.0, 1.0, 6))
    assert np.any(logits) and not np.any(bias)
