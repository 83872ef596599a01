"""Calibration of the static multipliers on real sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import CONFIG, params, policy

from trace_jax.errors import UserError
from trace_jax.quantization.calibration import calibrate
from trace_jax.quantization.plan import SITES

RNG = np.random.default_rng(1)
PROMPTS = RNG.integers(0, CONFIG.vocab_size, (4, 16)).tolist()


def test_every_site_and_layer_gets_a_finite_positive_multiplier():
    result = calibrate(policy(), params(), PROMPTS, 1.5)
    assert set(result) == set(SITES)
    for value in result.values():
        assert value.shape == (CONFIG.num_layers,) and value.dtype == jnp.float32
        assert np.all(np.isfinite(value)) and np.all(value > 0)


def test_headroom_of_a_power_of_two_scales_the_multipliers_by_it():
    plain, roomy = calibrate(policy(), params(), PROMPTS, 1.0), calibrate(policy(), params(), PROMPTS, 4.0)
    for site in SITES:
        np.testing.assert_array_equal(roomy[site], plain[site] * 4)


def test_batching_and_repetition_do_not_matter():
    """A ragged set gives the maximum over its members, whatever stands beside them: padding never counts."""
    ragged = [PROMPTS[0], PROMPTS[1][:8], PROMPTS[2][:11]]
    together = calibrate(policy(), params(), ragged, 1.0)
    alone = [calibrate(policy(), params(), [tokens], 1.0) for tokens in ragged]
    for site in SITES:
        np.testing.assert_array_equal(together[site], np.max([part[site] for part in alone], axis=0))
    many = calibrate(policy(), params(), ragged * 12, 1.0)
    jax.tree.map(np.testing.assert_array_equal, many, together)


def test_the_end_of_a_sequence_of_odd_length_is_seen():
    """Token 7 alone drives the values up; it stands behind the last full power of two."""
    loud = jax.tree.map(lambda x: x, params())
    values = loud["groups"][0]["attention"]["v_proj"]
    direction = loud["embed"]["weight"][7]
    loud["groups"][0]["attention"] = loud["groups"][0]["attention"] | {
        "v_proj": values.at[:, 0].set(direction / jnp.linalg.norm(direction) * 50)
    }
    quiet_tokens = [t for t in range(20, 38)]
    quiet = calibrate(policy(), loud, [quiet_tokens], 1.0)
    ended = calibrate(policy(), loud, [[*quiet_tokens, 7]], 1.0)
    assert ended["v"][0] > quiet["v"][0]


@pytest.mark.parametrize("where", ["embed", "experts.down", "attention.k_proj", "router", "final_norm", "lm_head"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_wherever_they_are(where, value):
    damaged = jax.tree.map(lambda x: x, params())
    layers = damaged["groups"][0]
    if where in ("embed", "lm_head"):
        damaged[where] = {"weight": damaged[where]["weight"].at[3, 0].set(value)}
    elif where == "final_norm":
        damaged[where] = damaged[where].at[0].set(value)
    elif where == "router":
        layers[where] = layers[where].at[-1, 0, 0].set(value)
    else:
        module, name = where.split(".")
        layers[module] = layers[module] | {name: layers[module][name].at[-1, 0, 0].set(value)}
    with pytest.raises(UserError, match=rf"^calibration: the weight [\w.]*{where.split('.')[-1]}[\w.]* holds NaN or Inf") as error:
        calibrate(policy(), damaged, PROMPTS, 1.5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing_to_calibrate_on_is_a_user_error(sequences):
    with pytest.raises(UserError, match="no prompts"):
        calibrate(policy(), params(), sequences, 1.5)


def test_an_empty_sequence_among_others_is_ignored():
    jax.tree.map(
        np.testing.assert_array_equal, calibrate(policy(), params(), [[], *PROMPTS], 1.5), calibrate(policy(), params(), PROMPTS, 1.5)
    )
