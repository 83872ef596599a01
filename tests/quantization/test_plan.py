"""Plans: formats from the rollout, rounding from the trainer, and the rounding of one site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Guide, block_format, guided_fake_quant, quantize
from trace_jax.quantization.multipliers import site_multiplier, static_multipliers, token_multiplier
from trace_jax.quantization.plan import UNQUANTIZED, QuantPlan, SitePlan, rollout_plan, trainer_plan
from trace_jax.quantization.sites import parity_agreement, round_site

ROLLOUT = rollout_plan("nvfp4", "mxfp4", "nvfp4", "fp8")
RNG = np.random.default_rng(0)


def test_a_rollout_plan_rounds_to_nearest_everywhere():
    assert ROLLOUT == QuantPlan("nvfp4", SitePlan("mxfp4"), SitePlan("mxfp4"), SitePlan("nvfp4"), SitePlan("fp8"))
    assert ROLLOUT.guided_sites == ()
    assert rollout_plan("bf16", "bf16", "bf16", "bf16") == UNQUANTIZED


def test_the_trainer_takes_its_formats_from_the_rollout():
    plan = trainer_plan(ROLLOUT, "rtn", "guided", "rtn", "guided")
    assert plan.weights == "nvfp4"
    assert plan.expert_input == SitePlan("mxfp4", guided=True)
    assert plan.down_input == SitePlan("mxfp4")
    assert plan.k == SitePlan("nvfp4", guided=True)
    assert plan.v == SitePlan("fp8")  # no record holds FP8
    assert plan.guided_sites == ("expert_input", "k")


def test_none_switches_a_site_off_and_bf16_stays_unrounded():
    assert trainer_plan(ROLLOUT, "none", "none", "none", "none") == UNQUANTIZED
    assert trainer_plan(UNQUANTIZED, "rtn", "guided", "rtn", "guided") == UNQUANTIZED
    assert trainer_plan(rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4", per_token=True), "rtn", "rtn", "rtn", "rtn").per_token


@pytest.mark.parametrize("amax", [1e-30, 0.02, 1.0, 7.3, 448.0, 3e4])
def test_multipliers_are_powers_of_two_nudged_for_activations_and_plain_for_the_cache(amax):
    value = jnp.float32(amax)
    for site, limit, nudge in [
        ("k", 448.0, 1.0),
        ("v", 448.0, 1.0),
        ("expert_input", 2688.0, 1 + 2**-17),
        ("down_input", 2688.0, 1 + 2**-17),
    ]:
        plain = float(site_multiplier(site, value)) / nudge
        assert np.frexp(plain)[0] == 0.5, (site, plain)
        assert limit / 2 < float(value) / plain <= limit
    assert site_multiplier("k", value).astype(jnp.bfloat16).astype(jnp.float32) == site_multiplier("k", value)


@pytest.mark.parametrize("site", ["expert_input", "down_input", "k", "v"])
def test_exp_02_multipliers_are_finite_and_positive_for_any_amax(site):
    values = jnp.asarray([0.0, 1e-45, 1e-38, 3e38, jnp.inf, jnp.nan], jnp.float32)
    result = np.asarray(site_multiplier(site, values))
    assert np.all(np.isfinite(result)) and np.all(result > 0)


def test_headroom_raises_the_multiplier_and_one_leaves_room_for_the_largest_value():
    amax = {"k": jnp.asarray([1.0, 5.0]), "expert_input": jnp.asarray([2688.0, 0.3])}
    plain, raised = static_multipliers(amax, 1.0), static_multipliers(amax, 4.0)
    for site in amax:
        np.testing.assert_array_equal(raised[site], plain[site] * 4)
    assert plain["expert_input"][0] == np.float32(1 + 2**-17)


def test_token_multipliers_are_per_token_and_shared_by_the_heads():
    x = jnp.asarray(RNG.normal(size=(2, 3, 4, 16)) * np.asarray([1, 10, 100])[:, None, None], jnp.float32)
    result = token_multiplier("k", x, shared_axes=1)
    assert result.shape == (2, 3, 4)
    amax = np.abs(np.asarray(x)).max((-1, -2))
    np.testing.assert_array_equal(result, np.broadcast_to(np.asarray(site_multiplier("k", jnp.asarray(amax)))[..., None], (2, 3, 4)))
    later = x.at[:, 2].mul(1000.0)
    np.testing.assert_array_equal(token_multiplier("k", later, shared_axes=1)[:, :2], result[:, :2])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("per_token", [False, True])
def test_captured_rounding_equals_rounding_and_the_gradient_passes_through(fmt, per_token):
    x = jnp.asarray(RNG.normal(size=(2, 3, 40)), jnp.float32)
    multiplier = jnp.float32(2.0**-9)

    def loss(x, capture):
        rounded, kept = round_site("expert_input", x, SitePlan(fmt), multiplier, per_token=per_token, capture=capture)
        return jnp.sum(rounded * 3.0), (rounded, kept)

    (_, (plain, nothing)), gradient = jax.value_and_grad(loss, has_aux=True)(x, False)
    rounded, kept = loss(x, True)[1]
    np.testing.assert_array_equal(plain, rounded)
    np.testing.assert_array_equal(gradient, np.full(x.shape, 3.0, np.float32))
    assert nothing is None and (kept is not None) == (fmt in ("nvfp4", "mxfp4"))
    if kept is not None:
        assert (kept.multiplier is not None) == (per_token and fmt == "nvfp4")
        assert kept.codes.shape == (2, 3, 20)


def test_nvfp4_without_any_multiplier_says_what_to_do():
    with pytest.raises(ValueError, match="site k has no static multiplier: calibrate"):
        round_site("k", jnp.ones((1, 1, 1, 16)), SitePlan("nvfp4"), None)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_parity_counts_the_values_that_have_a_record(fmt):
    """MXFP4 sites meet a static multiplier here, as in a trainer whose checkpoint was calibrated for every site."""
    x, multiplier = jnp.asarray(RNG.normal(size=(2, 3, 32)), jnp.float32), jnp.float32(2.0**-9)
    block = block_format(fmt)
    own = quantize(x, block, multiplier if block.has_multiplier else None)
    valid = jnp.asarray([[True, True, False], [True, False, False]])
    scale = jnp.broadcast_to(multiplier, (2, 3)) if block.has_multiplier else None

    def agreement(codes):
        guide = Guide(kind="codes", data=codes, scales=own.scales, multiplier=scale, valid=valid)
        rounded = guided_fake_quant(x, guide, block, multiplier if block.has_multiplier else None)
        return [float(part) for part in parity_agreement("k", x, rounded, guide, SitePlan(fmt, guided=True), multiplier)]

    assert agreement(own.codes) == [96.0, 96.0]
    total, count = agreement(own.codes ^ 1)
    assert count == 96.0 and 48 <= total < 86  # every second code was moved, and some of those to the other neighbour
