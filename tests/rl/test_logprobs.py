import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import entropy_from_logits, token_logprobs

LN = np.log


def test_logp_07_alignment_with_hand_computed_values():
    # Vocabulary of 2. p(1 | position t) = sigmoid(logit_1 - logit_0): logits (0, ln 3) -> 3/4, (0, 0) -> 1/2.
    logits = jnp.array([[[0.0, LN(3)], [0.0, 0.0], [9.0, -9.0]]], jnp.float32)
    tokens = jnp.array([[0, 1, 0]], jnp.int32)
    # Token 1 is drawn from the logits at 0, token 2 from those at 1; nothing precedes token 0; the last logits are unused.
    got = token_logprobs(logits, tokens, jnp.ones(1, jnp.float32))
    np.testing.assert_allclose(got, [[0.0, LN(3 / 4), LN(1 / 2)]], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logp_02_temperature_divides_the_logits(temperature):
    logits = jax.random.normal(jax.random.key(0), (2, 4, 5), jnp.float32) * 3
    tokens = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]], jnp.int32)
    got = token_logprobs(logits, tokens, jnp.array([temperature, 1.0], jnp.float32))
    powers = np.exp(np.asarray(logits, np.float64) / np.array([temperature, 1.0])[:, None, None])
    probability = powers / powers.sum(-1, keepdims=True)
    for b in range(2):
        for t in range(1, 4):
            np.testing.assert_allclose(got[b, t], LN(probability[b, t - 1, tokens[b, t]]), rtol=2e-5)


def test_logp_08_row_of_two_documents_equals_each_alone():
    # Sequence log-probs only need their own logits, so two documents in one row equal each alone, but for the first token.
    logits = jax.random.normal(jax.random.key(1), (1, 5, 4), jnp.float32)
    tokens = jnp.array([[1, 2, 3, 0, 1]], jnp.int32)
    one = jnp.ones(1, jnp.float32)
    packed = token_logprobs(logits, tokens, one)
    for start, stop in [(0, 1), (1, 3), (0, 5)]:
        alone = token_logprobs(logits[:, start:stop], tokens[:, start:stop], one)
        np.testing.assert_array_equal(alone[:, 1:], packed[:, start + 1 : stop])
        assert alone[0, 0] == 0.0


def test_logp_09_inputs_are_not_changed():
    logits = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    before = logits.copy()
    token_logprobs(jnp.asarray(logits), jnp.zeros((1, 3), jnp.int32), jnp.full(1, 0.5, jnp.float32))
    np.testing.assert_array_equal(logits, before)


def test_entropy_hand_computed():
    # Uniform over 4: ln 4. (3/4, 1/4): 3/4 ln(4/3) + 1/4 ln 4 = 0.5623351. One possible token: 0. Impossible tokens add 0.
    inf = np.inf
    logits = jnp.array([[5.0] * 4, [LN(3), 0.0, -inf, -inf], [2.0, -inf, -inf, -inf]], jnp.float32)
    for function in (entropy_from_logits, jax.jit(entropy_from_logits), jax.vmap(entropy_from_logits)):
        np.testing.assert_allclose(function(logits), [1.3862944, 0.5623351, 0.0], rtol=1e-6, atol=1e-7)
    assert entropy_from_logits(logits.astype(jnp.bfloat16)).dtype == jnp.float32


def test_entropy_gradient_is_finite_with_impossible_tokens():
    gradient = jax.grad(lambda x: entropy_from_logits(x).sum())(jnp.array([[1.0, 0.0, -jnp.inf]], jnp.float32))
    assert np.isfinite(gradient[:, :2]).all()
