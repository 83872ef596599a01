"""Log-probabilities and entropy against values computed by hand; the head is the identity, so `hidden` is the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.layers import logprobs
from trace_jax.layers.logprobs import entropy_of, token_logprobs

LN = np.log


def test_logp_07_alignment_with_hand_computed_values():
    # Vocabulary of 2. p(1 | position t) = sigmoid(logit_1 - logit_0): logits (0, ln 3) -> 3/4, (0, 0) -> 1/2.
    hidden = jnp.array([[[0.0, LN(3)], [0.0, 0.0]]], jnp.float32)
    logp, entropy = token_logprobs(hidden, jnp.eye(2, dtype=jnp.float32), jnp.array([[1, 0]], jnp.int32), jnp.ones(1, jnp.float32))
    np.testing.assert_allclose(logp, [[LN(3 / 4), LN(1 / 2)]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0.5623351, LN(2)]], rtol=1e-6)


@pytest.mark.parametrize("limit", [1 << 24, 20])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logp_02_temperature_divides_the_logits_also_in_slices(temperature, limit, monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS_LIMIT", limit)
    hidden = jax.random.normal(jax.random.key(0), (2, 4, 5), jnp.float32) * 3
    targets = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]], jnp.int32)
    got, _ = token_logprobs(hidden, jnp.eye(5, dtype=jnp.float32), targets, jnp.array([temperature, 0.0], jnp.float32))
    powers = np.exp(np.asarray(hidden, np.float64) / np.array([temperature, 1.0])[:, None, None])
    probability = powers / powers.sum(-1, keepdims=True)
    expected = LN(np.take_along_axis(probability, np.asarray(targets)[..., None], -1)[..., 0])
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_entropy_hand_computed():
    # Uniform over 4: ln 4. (3/4, 1/4): 3/4 ln(4/3) + 1/4 ln 4 = 0.5623351. One possible token: 0. Impossible tokens add 0.
    logp = jnp.log(jnp.array([[0.25] * 4, [0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], jnp.float32))
    for function in (entropy_of, jax.jit(entropy_of), jax.vmap(entropy_of)):
        np.testing.assert_allclose(function(logp), [1.3862944, 0.5623351, 0.0], rtol=1e-6, atol=1e-7)


def test_entropy_gradient_is_finite_with_impossible_tokens():
    gradient = jax.grad(lambda x: entropy_of(jax.nn.log_softmax(x)).sum())(jnp.array([[1.0, 0.0, -jnp.inf]], jnp.float32))
    assert np.isfinite(gradient[:, :2]).all()
