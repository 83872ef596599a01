"""Entropy of normalised log-probabilities against values computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.layers.logprobs import entropy_of


def test_entropy_hand_computed():
    # Uniform over 4: ln 4. (3/4, 1/4): 3/4 ln(4/3) + 1/4 ln 4 = 0.5623351. One possible token: 0. Impossible tokens add 0.
    logp = jnp.log(jnp.array([[0.25] * 4, [0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], jnp.float32))
    for function in (entropy_of, jax.jit(entropy_of), jax.vmap(entropy_of)):
        np.testing.assert_allclose(function(logp), [1.3862944, 0.5623351, 0.0], rtol=1e-6, atol=1e-7)


def test_entropy_gradient_is_finite_with_impossible_tokens():
    gradient = jax.grad(lambda x: entropy_of(jax.nn.log_softmax(x)).sum())(jnp.array([[1.0, 0.0, -jnp.inf]], jnp.float32))
    assert np.isfinite(gradient[:, :2]).all()
