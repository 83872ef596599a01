import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import finalize
from trace_jax.rl import Correction, correction_stats, rollout_weights

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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["tis", "mis", "icepop"])
def test_a_nan_on_a_sampled_token_is_not_hidden(kind, level):
    weights = rollout_weights(LOGP_OLD, LOGP_ROLLOUT, jnp.ones_like(MASK), kind=kind, level=level)
    np.testing.assert_array_equal(np.isnan(weights), [[False] * 3, [level != "token", True, level != "token"]])


# log rho = 0, 2, -1 | 0.1, -29. Sums 1 and -28.9 (clamped to -20), means 1/3 and -14.45: e = 2.7182817, e^(1/3) = 1.3956124.
LEAST = 2.0611537e-9
LEVELS = {
    # Sequence TIS (verl): min(product, C).
    Correction("tis", "sequence", 2.0): ([[2.0] * 3, [LEAST, 0, LEAST]], {"rollout_is_seq_ratio_fraction_high": 3 / 5}),
    Correction("tis", "geometric", 2.0): ([[1.3956124] * 3, [5.302e-7, 0, 5.302e-7]], {"rollout_is_seq_ratio_fraction_high": 0}),
    # Masked importance sampling: the token, or the whole sequence, is dropped above C.
    Correction("mis", "token", 5.0): (
        [[1.0, 0, 0.36787944], [1.1051709, 0, LEAST]],
        {"rollout_rs_masked_fraction": 1 / 5, "rollout_rs_seq_masked_fraction": 1 / 2},
    ),
    Correction("mis", "sequence", 2.0): (
        [[0, 0, 0], [LEAST, 0, LEAST]],
        {"rollout_is_seq_ratio_fraction_high": 3 / 5, "rollout_rs_masked_fraction": 3 / 5, "rollout_rs_seq_masked_fraction": 1 / 2},
    ),
    # IcePop: rho within [low, cap], else 0.
    Correction("icepop", "token", 5.0, 0.5): (
        [[1.0, 0, 0], [1.1051709, 0, 0]],
        {"rollout_is_ratio_fraction_low": 2 / 5, "rollout_rs_masked_fraction": 3 / 5, "rollout_rs_seq_masked_fraction": 1.0},
    ),
    Correction("icepop", "geometric", 2.0, 0.5): (
        [[1.3956124] * 3, [0, 0, 0]],
        {
            "rollout_is_seq_ratio_fraction_high": 0,
            "rollout_is_ratio_fraction_low": 2 / 5,
            "rollout_rs_masked_fraction": 2 / 5,
            "rollout_rs_seq_masked_fraction": 1 / 2,
        },
    ),
    # The figures of the truncated token weight are those of `mismatch_stats`.
    Correction("tis", "token", 5.0): (EXPECTED, {}),
    Correction("none"): (np.asarray(MASK, np.float32), {}),
}


@pytest.mark.parametrize("correction", LEVELS)
def test_kinds_and_levels_hand_computed(correction):
    expected, figures = LEVELS[correction]
    weights = rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, **correction._asdict())
    np.testing.assert_allclose(weights, np.asarray(expected, np.float32), rtol=1e-4)
    stats = finalize(correction_stats(weights, LOGP_OLD, LOGP_ROLLOUT, MASK, None, correction))
    assert stats == pytest.approx({f"rollout_corr/{name}": value for name, value in figures.items()})
    # A row without a sampled token is no sequence and changes no figure.
    weights, old, rollout = (jnp.concatenate([x, x[:1]]) for x in (weights, LOGP_OLD, LOGP_ROLLOUT))
    mask = jnp.concatenate([MASK, jnp.zeros((1, 3), bool)])
    assert finalize(correction_stats(weights, old, rollout, mask, None, correction)) == pytest.approx(stats)


def test_logp_06_swapping_sampler_and_trainer_changes_the_mask():
    kept, swapped = (rollout_weights(*pair, MASK, kind="icepop") > 0 for pair in ((LOGP_OLD, LOGP_ROLLOUT), (LOGP_ROLLOUT, LOGP_OLD)))
    np.testing.assert_array_equal(kept, [[True, False, False], [True, False, False]])
    np.testing.assert_array_equal(swapped, [[True, False, True], [True, False, False]])


@pytest.mark.usefixtures("unchecked")
def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="write one of none, tis, mis, icepop"):
        rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, kind="geo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap must be positive"):
        rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, cap=0.0)
    with pytest.raises(ValueError, match="below the cap"):
        rollout_weights(LOGP_OLD, LOGP_ROLLOUT, MASK, kind="icepop", cap=0.5, low=0.5)
