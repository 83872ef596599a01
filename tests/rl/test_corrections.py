import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import rollout_weights

LOGP_OLD = jnp.array([[-1.0, -1.0, -2.0], [-0.5, jnp.nan, -30.0]], jnp.float32)
LOGP_ROLLOUT = jnp.array([[-1.0, -3.0, -1.0], [-0.6, -1.0, -1.0]], jnp.float32)
MASK = jnp.array([[True, True, True], [True, False, True]])
# FlashRL: min(pi_old / pi_rollout, C), C = 5. exp(0) = 1; exp(2) = 7.389 -> 5; exp(-1) = 0.36787944; exp(0.1) = 1.1051709;
# padding -> 0; exp(-29) is clamped to exp(-20) = 2.0611537e-9.
EXPECTED = np.array([[1.0, 5.0, 0.36787944], [1.1051709, 0.0, 2.0611537e-9]], np.float32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: lambda *a: jax.vmap(lambda *r: f(*(x[None] for x in r))[0])(*a)])
def test_hand_computed(transform):
    np.testing.assert_allclose(transform(rollout_weights)(LOGP_OLD, LOGP_ROLLOUT, MASK), EXPECTED, rtol=1e-6)


def test_kind_none_is_one_on_sampled_tokens():
    np.testing.assert_array_equal(rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, kind="none"), MASK.astype(jnp.float32))


def test_no_gradient_flows_through_the_weight():
    gradient = jax.grad(lambda old, new: rollout_weights(old, new, MASK).sum(), argnums=(0, 1))(LOGP_OLD, LOGP_ROLLOUT)
    for part in gradient:
        np.testing.assert_array_equal(part, jnp.zeros_like(part))


def test_logp_06_swapping_sampler_and_trainer_changes_the_weights():
    swapped = rollout_weights(LOGP_ROLLOUT, LOGP_OLD, MASK)
    assert abs(float(swapped[0, 1]) - float(np.exp(-2.0))) < 1e-6
    assert not np.allclose(swapped, EXPECTED, atol=0.1)


def test_a_nan_on_a_sampled_token_is_not_hidden():
    assert np.isnan(rollout_weights(LOGP_OLD, LOGP_ROLLOUT, jnp.ones_like(MASK))[1, 1])


@pytest.mark.usefixtures("unchecked")
def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="'none' or 'tis'"):
        rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, kind="mis")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap must be positive"):
        rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, cap=0.0)
