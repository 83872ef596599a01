"""Log-probabilities: alignment, temperature, entropy, and slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.layers import logprobs
from trace_jax.layers.logprobs import logits_of, token_logprobs


def case(batch=2, length=7, width=5, vocabulary=11):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(batch, length, width)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32)
    return hidden, head, jnp.asarray(rng.integers(0, vocabulary, (batch, length)), jnp.int32)


def test_logp_07_alignment_on_a_hand_computed_sequence():
    """Hidden state t predicts the token after t; with an identity head the hidden state is the logits."""
    hidden = jnp.asarray([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]], jnp.float32)
    following = jnp.asarray([[2, 0, 1]], jnp.int32)
    logp, entropy = token_logprobs(hidden, jnp.eye(3, dtype=jnp.float32), following, jnp.ones((1, 3), jnp.float32))
    np.testing.assert_allclose(logp[0], [-1.0986123, -0.5514447, -0.2395448], rtol=1e-5)
    np.testing.assert_allclose(entropy[0], [1.0986123, 0.9753276, 0.6655722], rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logp_02_logits_are_divided_by_the_temperature_of_the_token(temperature):
    """Sequences of one packed row may have been sampled at different temperatures."""
    hidden, head, targets = case()
    logp, entropy = token_logprobs(hidden, head, targets, jnp.ones((2, 7), jnp.float32).at[0, 2:5].set(temperature))
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    logits[0, 2:5] /= temperature
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1), rtol=1e-5)


def test_temperature_zero_counts_as_one():
    hidden, head, targets = case()
    greedy, plain = (token_logprobs(hidden, head, targets, jnp.full((2, 7), t, jnp.float32))[0] for t in (0.0, 1.0))
    np.testing.assert_array_equal(greedy, plain)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_slices_change_neither_values_nor_gradients(monkeypatch, width):
    hidden, head, targets = case()
    temperature = jnp.linspace(0.5, 1.5, 14, dtype=jnp.float32).reshape(2, 7)

    def loss(hidden, head):
        logp, entropy = token_logprobs(hidden, head, targets, temperature)
        return jnp.sum(jnp.sin(logp)) + jnp.sum(entropy), (logp, entropy)

    whole, whole_gradient = loss(hidden, head)[1], jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)[0]
    monkeypatch.setattr(logprobs, "LOGITS_LIMIT", width * 2 * 11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), loss(hidden, head)[1], whole)
    sliced_gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), sliced_gradient, whole_gradient)


def test_logits_of_bfloat16_are_accumulated_in_float32():
    hidden, head, _ = case()
    logits = logits_of(hidden.astype(jnp.bfloat16), head)
    assert logits.dtype == jnp.float32
    exact = np.asarray(hidden.astype(jnp.bfloat16), np.float64) @ np.asarray(head.astype(jnp.bfloat16), np.float64).T
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
