"""Each algorithm's objective against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import finalize
from trace_jax.rl import PolicyLoss, normalized, policy_loss_sum, sequence_divisors

LN = np.log
# The batch of test_losses.py: ratios 1.5, 0.5, 1 | 1.5, 0.5 and a padded token of garbage; advantages 2 and -1.
LOGP = jnp.array([[LN(1.5), LN(0.5), 0.0], [LN(1.5), LN(0.5), jnp.nan]], jnp.float32)
LOGP_OLD = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.0, jnp.inf]], jnp.float32)
MASK = jnp.array([[True, True, True], [True, True, False]])
ADVANTAGES = jnp.array([2.0, -1.0], jnp.float32)
LENGTHS = np.array([3, 2])


def evaluate(loss, *, logp=LOGP, advantages=ADVANTAGES, weights=None, divisors=None):
    """Loss sum, its gradient, and the share of clipped tokens."""

    def loss_sum(x):
        return policy_loss_sum(x, LOGP_OLD, advantages, MASK, weights, divisors, loss=loss)

    (value, stats), gradient = jax.value_and_grad(loss_sum, has_aux=True)(logp)
    return value, gradient, finalize(stats)["policy/clip_fraction"]


def test_dual_clip_hand_computed():
    # Ye et al. (arXiv 1912.09729), c = 1.4: for A = -1 and r = 1.5 max(-1.5, -1.4) = -1.4, a bound without a gradient; r = 0.5 stays
    # at min(-0.5, -0.8) = -0.8. Positive advantages as before: 2.56, 1, 2. Sum 3.36; clipped 3 of 5.
    value, gradient, clipped = evaluate(PolicyLoss(clip_low=0.2, clip_high=0.28, clip_c=1.4))
    np.testing.assert_allclose(value, -3.36, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -1, -2], [0, 0, 0]], rtol=1e-6)
    assert clipped == pytest.approx(3 / 5)


def test_cispo_hand_computed():
    # MiniMax-M1 (arXiv 2506.13585) eq. 4: weights clip(1.5, .8, 1.28) = 1.28, clip(.5) = .8, 1 | 1.28, .8, times A log pi:
    # 2 (1.28 ln 1.5 + .8 ln .5 + 0) - (1.28 ln 1.5 + .8 ln .5) = 1.28 ln 1.5 + .8 ln .5 = -0.0355225.
    # Gradient of the loss: -weight A, also where the weight is cut.
    value, gradient, clipped = evaluate(PolicyLoss("cispo", clip_low=0.2, clip_high=0.28))
    np.testing.assert_allclose(value, 0.0355225, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-2.56, -1.6, -2], [1.28, 0.8, 0]], rtol=1e-6)
    assert clipped == pytest.approx(4 / 5)
    # Without a lower bound: .5 counts as .5.
    np.testing.assert_allclose(evaluate(PolicyLoss("cispo", clip_low=1.0, clip_high=0.28))[1][1], [1.28, 0.5, 0], rtol=1e-6)


def test_gspo_hand_computed():
    # GSPO (arXiv 2507.18071) eq. 5 to 7: s = (1.5 * .5 * 1)^(1/3) = .9085603 and (1.5 * .5)^(1/2) = .8660254; clip .1 / .1.
    # A = 2: 2 s = 1.8171206 inside; A = -1: min(-.8660254, -.9) = -.9 clipped. Mean of the two: .4585603.
    # d/dlogp of -(1/2) 2 s: -s / 3 = -.3028534 on each token.
    loss = PolicyLoss(ratio_level="geometric", clip_low=0.1, clip_high=0.1)
    divisors = sequence_divisors(LENGTHS, "seq_mean_token_mean")
    per_token = jnp.broadcast_to(jnp.asarray(divisors)[:, None], MASK.shape)
    value, gradient, clipped = evaluate(loss, divisors=per_token)
    np.testing.assert_allclose(normalized(value, 2), -0.4585603, rtol=1e-6)
    np.testing.assert_allclose(gradient / 2, [[-0.3028534] * 3, [0, 0, 0]], rtol=1e-6)
    assert clipped == pytest.approx(2 / 5)
    # Control: one ratio per token gives another loss.
    assert abs(float(value - evaluate(loss._replace(ratio_level="token"), divisors=per_token)[0])) > 0.1


@pytest.mark.parametrize(
    ("factor", "objective", "slope"),
    [
        # QaRL's TBPO (arXiv 2604.07853), band [.9, 1.2] for A < 0: below, inside, above.
        (0.8, -0.9, 0.0),
        (1.1, -1.1, 0.55),
        (1.5, -1.2, 0.0),
    ],
)
def test_trust_band_hand_computed(factor, objective, slope):
    logp = jnp.full((2, 3), LN(factor), jnp.float32)
    loss = PolicyLoss(ratio_level="geometric", clip_low=0.1, clip_high=0.05, clip_c=1.2)
    divisors = jnp.array([[3.0] * 3, [2.0] * 3], jnp.float32)
    value, gradient, clipped = evaluate(loss, logp=logp, advantages=jnp.array([0.0, -1.0], jnp.float32), divisors=divisors)
    np.testing.assert_allclose(value, -objective, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0] * 3, [slope, slope, 0]], rtol=1e-6, atol=1e-7)
    assert clipped == pytest.approx(2 / 5 if slope == 0 else 0)
    # A > 0 has the usual upper clip alone: min(r, 1.05).
    value, gradient, _ = evaluate(loss, logp=logp, advantages=jnp.array([1.0, 0.0], jnp.float32), divisors=divisors)
    np.testing.assert_allclose(value, -min(factor, 1.05), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [-factor / 3 if factor < 1.05 else 0] * 3, rtol=1e-6)


LOSSES = [
    PolicyLoss(),
    PolicyLoss("cispo", clip_low=1.0, clip_high=5.0),
    PolicyLoss(ratio_level="geometric", clip_low=3e-4, clip_high=4e-4),
    PolicyLoss(ratio_level="geometric", clip_low=3e-4, clip_high=4e-4, clip_c=1.0007),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss):
    """pi = pi_old: nothing is clipped, and the gradient is -w A, exactly."""
    weights = jnp.array([[0.5, 1.0, 2.0], [3.0, 1.0, jnp.nan]], jnp.float32)
    _, gradient, clipped = evaluate(loss, logp=LOGP_OLD, weights=weights)
    np.testing.assert_array_equal(gradient, [[-1, -2, -4], [3, 1, 0]])
    assert clipped == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_only_logp_has_a_gradient_and_extremes_stay_finite(loss):
    def of(logp, logp_old, advantages, weights):
        return policy_loss_sum(logp, logp_old, advantages, MASK, weights, loss=loss)[0]

    weights = jnp.ones((2, 3), jnp.float32)
    for gradient in jax.grad(of, argnums=(1, 2, 3))(LOGP, LOGP_OLD, ADVANTAGES, weights):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(gradient))
    for far in (90.0, -90.0):
        value, gradient = jax.value_and_grad(of)(LOGP + far, LOGP_OLD, ADVANTAGES, weights)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_nan_on_a_sampled_token_reaches_the_loss(loss):
    assert np.isnan(policy_loss_sum(LOGP.at[0, 0].set(jnp.nan), LOGP_OLD, ADVANTAGES, MASK, loss=loss)[0])
