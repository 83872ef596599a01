"""Sampling: the distribution drawn from is the one whose log-probability is returned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rollout.embedded.sampler import sample

ROWS, VOCABULARY = 4000, 7
LOGITS = np.asarray([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -3.0], np.float32)


def draw(temperature=1.0, top_p=1.0, top_k=0, truncated=True, seed=0):
    keys = jax.random.split(jax.random.key(seed), ROWS)
    logits = jnp.asarray(np.tile(LOGITS, (ROWS, 1)))
    rows = [jnp.full(ROWS, value, dtype) for value, dtype in ((temperature, jnp.float32), (top_p, jnp.float32), (top_k, jnp.int32))]
    tokens, logp = jax.jit(sample, static_argnames="truncated")(logits, keys, *rows, truncated=truncated)
    return np.asarray(tokens), np.asarray(logp)


def expected(temperature, top_p, top_k):
    """Probabilities by the definition: tokens by falling probability until the mass reaches `top_p`, at most `top_k`."""
    probability = np.exp(LOGITS.astype(np.float64) / temperature)
    probability /= probability.sum()
    kept, mass = np.zeros(VOCABULARY, bool), 0.0
    for token in np.argsort(-probability):
        if (mass >= top_p and top_p < 1) or (top_k > 0 and kept.sum() >= top_k):
            break
        kept[token] = True
        mass += probability[token]
    return np.where(kept, probability, 0) / probability[kept].sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.6, 0), (1.0, 3), (0.9, 2), (1e-6, 0), (0.999, 100)])
def test_logp_05_draws_and_log_probs_follow_the_same_distribution(temperature, top_p, top_k):
    tokens, logp = draw(temperature, top_p, top_k)
    probability = expected(temperature, top_p, top_k)
    np.testing.assert_allclose(logp, np.log(probability[tokens]), rtol=1e-4, atol=1e-5)
    frequency = np.bincount(tokens, minlength=VOCABULARY) / ROWS
    assert np.all(np.abs(frequency - probability) < 5 * np.sqrt(probability * (1 - probability) / ROWS) + 1e-9)


def test_a_plain_row_keeps_its_bits_beside_truncated_rows():
    plain, truncated = draw(truncated=False), draw(truncated=True)
    np.testing.assert_array_equal(plain[0], truncated[0])
    np.testing.assert_array_equal(plain[1], truncated[1])


def test_greedy_takes_the_first_of_the_most_probable_tokens_with_its_untempered_log_prob():
    tokens, logp = draw(temperature=0.0)
    assert not tokens.any()
    np.testing.assert_allclose(logp, np.log(expected(1.0, 1.0, 0)[0]), rtol=1e-5)
    tied = jnp.zeros((1, 5), jnp.float32)
    token, _ = sample(tied, jax.random.split(jax.random.key(0), 1), jnp.zeros(1), jnp.ones(1), jnp.zeros(1, jnp.int32), truncated=False)
    assert token[0] == 0
