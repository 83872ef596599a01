"""What the engine generated equals a teacher-forced forward of the same numerics, with controls that must fail.

Tolerances of the design: float32 compute, largest difference 1e-4 with codes and routes exact; bfloat16, mean 0.01 and
99th percentile 0.05. The bit-equal form of the test runs under an XLA flag in a process of its own.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from tests.selection import slow_but
from trace_jax.quantization.calibration import calibrate
from trace_jax.quantization.plan import RECORDED_SITES, UNQUANTIZED
from trace_jax.rollout import generate
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.train.objective import ObjectiveSpec, objective_and_gradient, without_guidance

PLAN = tiny.PLANS["nvfp4"]
TEMPERATURES = (0.7, 1.0, 1.3, 0.0)
"""One wave mixes them: rows i % 4."""


VARIANTS = {"tied": tiny.TIED, "biased": tiny.BIASED}
"""Other models, under NVFP4; every other case is the plain model under the plan of that name."""


def case(name):
    """Plan and model config."""
    return tiny.PLANS["nvfp4" if name in VARIANTS else name], VARIANTS.get(name, tiny.CONFIG)


def run(name, compute_dtype, wave=None):
    plan, config = case(name)
    wave = wave or [replace(request, temperature=TEMPERATURES[i % 4]) for i, request in enumerate(tiny.requests())]
    trajectories = generate(tiny.engine(plan, compute_dtype, kind="codes", config=config), wave)
    trajectories.validate()
    batch = tiny.batch_of(trajectories)
    logp, own = tiny.score(batch, tiny.guided(plan), compute_dtype, config)
    return trajectories, batch, logp, own


def controls(batch):
    """The same batch with something moved: each must miss the tolerance by a wide margin."""
    routed = batch.routes >= 0
    moved = {
        "temperature": replace(batch, temperature=batch.temperature * 1.5),
        "routes": replace(batch, routes=jnp.where(routed, jnp.roll(batch.routes, 1, axis=1), batch.routes)),
    }
    if batch.guides is not None:

        def shift(site):
            per_token = site.multiplier is not None and site.multiplier.ndim > 1
            multiplier = tiny.shifted(site.multiplier) if per_token else site.multiplier
            return replace(site, data=tiny.shifted(site.data), scales=tiny.shifted(site.scales), multiplier=multiplier)

        def coarser(site):
            step = 1 if site.multiplier is None else 8  # the exponent's last bit: half the scale
            return replace(site, scales=jnp.where(site.scales > step, site.scales - step, site.scales).astype(jnp.uint8))

        moved["records shifted by one token"] = tiny.with_guides(batch, shift)
        moved["layers swapped"] = tiny.with_guides(batch, lambda site: replace(site, slots=site.slots[::-1]))
        moved["another scale"] = tiny.with_guides(batch, coarser)
    return moved


@pytest.mark.parametrize("name", slow_but(("nvfp4", "fp8"), [*tiny.PLANS, *VARIANTS]))
def test_mis_04_logp_02_float32_log_probs_and_routes_are_those_of_the_trainer(name):
    """Rows have temperatures 0.7, 1, 1.3 and greedy: the engine reports log-probs after the temperature (LOGP-01)."""
    plan, config = case(name)
    _, batch, logp, own = run(name, "float32")
    assert tiny.gap(batch, logp).max() <= 1e-4
    routed = np.asarray(batch.routes).min(-1) >= 0
    np.testing.assert_array_equal(np.sort(own, -1)[routed], np.sort(np.asarray(batch.routes), -1)[routed])
    free = replace(without_guidance(batch), routes=jnp.full_like(np.asarray(batch.routes), -1))
    assert tiny.gap(batch, tiny.score(free, tiny.guided(plan), "float32", config)[0]).max() <= 1e-4  # own rounding, own routes
    for what, control in controls(batch).items():
        wrong = tiny.gap(batch, tiny.score(control, tiny.guided(plan), "float32", config)[0])
        assert wrong.max() > 0.05 and wrong.mean() > 1e-3, (what, wrong.mean(), wrong.max())
    if plan != UNQUANTIZED:
        unrounded = tiny.gap(batch, tiny.score(replace(batch, guides=None), UNQUANTIZED, "float32", config)[0])
        assert unrounded.max() > 0.05 and unrounded.mean() > 1e-3, (unrounded.mean(), unrounded.max())


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_other_models_are_other_models(variant):
    """Scored with the plain model's head, or without the biases, the answers are far off."""
    _, batch, _, _ = run(variant, "float32")
    masters = tiny.params(0, VARIANTS[variant])
    group = masters["groups"][0]
    if variant == "tied":
        masters = masters | {"lm_head": tiny.params()["lm_head"]}
    else:
        plain = {key: value for key, value in group["attention"].items() if not key.endswith("_bias")}
        masters = masters | {"groups": {0: group | {"attention": plain}}}
    logp, _ = tiny.score(batch, tiny.guided(PLAN), "float32", masters=masters, scales=tiny.multipliers(0, VARIANTS[variant]))
    assert tiny.gap(batch, logp).mean() > 0.2


def test_an_answer_generated_alone_is_that_of_the_trainer():
    """One request: the wave is padded to two rows, which compile to another program."""
    trajectories, batch, logp, _ = run("nvfp4", "float32", tiny.requests()[3:4])
    assert trajectories.num_sequences == 1 and tiny.gap(batch, logp).max() <= 1e-4
    for what, control in controls(batch).items():
        wrong = tiny.gap(batch, tiny.score(control, tiny.guided(PLAN), "float32")[0])
        assert wrong.max() > 0.05, (what, wrong.max())


@pytest.mark.slow
def test_the_gradient_program_has_the_log_probs_of_the_engine_with_and_without_remat():
    """Training reports the log-probs of the program that also computes the gradient, with layers recomputed or not."""
    _, batch, _, _ = run("nvfp4", "float32")
    batch = replace(batch, advantages=jnp.sin(batch.tokens.astype(jnp.float32)))
    shifted = tiny.with_guides(batch, lambda site: replace(site, data=tiny.shifted(site.data), scales=tiny.shifted(site.scales)))
    gradients = []
    for remat in (False, True):
        spec = ObjectiveSpec(replace(tiny.policy("float32"), remat=remat), tiny.guided(PLAN))
        total = jnp.float32(np.asarray(batch.sampled).sum())
        gradient, logp, _ = objective_and_gradient(tiny.params(), tiny.multipliers(), batch, total, spec=spec)
        assert tiny.gap(batch, np.asarray(logp)).max() <= 1e-4
        _, wrong, _ = objective_and_gradient(tiny.params(), tiny.multipliers(), shifted, total, spec=spec)
        assert tiny.gap(batch, np.asarray(wrong)).mean() > 0.01
        gradients.append(gradient)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradients[0]))
    assert scale > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), *gradients)


@pytest.mark.parametrize("name", slow_but(("nvfp4",), ["nvfp4", "fp8"]))
def test_mis_06_an_outlier_channel_is_not_clipped(name):
    """One channel of V is 40 times the others: calibration covers it, and prefill, decode and the long forward agree."""
    plan, group = tiny.PLANS[name], tiny.params()["groups"][0]

    def with_channel(factor):
        attention = group["attention"]
        louder = attention | {"v_proj": attention["v_proj"].at[:, 5].multiply(factor)}
        return tiny.params() | {"groups": {0: group | {"attention": louder}}}

    masters, rng = with_channel(40.0), np.random.default_rng(0)
    scales = calibrate(tiny.policy(), masters, rng.integers(0, tiny.CONFIG.vocab_size, (8, 32)).tolist(), 1.5)
    engine = tiny.engine(plan, "float32", kind="codes", seed=None)
    engine.update_weights(layer_updates(tiny.policy("float32"), plan, masters, scales), 0)
    batch = without_guidance(tiny.batch_of(generate(engine, tiny.requests())))
    assert tiny.gap(batch, tiny.score(batch, tiny.guided(plan), "float32", masters=masters, scales=scales)[0]).max() <= 1e-4
    clipped = tiny.score(batch, tiny.guided(plan), "float32", masters=with_channel(10.0), scales=scales)[0]
    assert tiny.gap(batch, clipped).mean() > 0.01


@pytest.mark.parametrize("plan_name", slow_but(("nvfp4",), ["nvfp4", "mxfp4", "per_token"]))
def test_mis_05_float32_codes_of_decode_are_those_of_one_long_forward(plan_name):
    """The newest key and value included: a forward over everything at once rounds them alike."""
    trajectories, batch, _, _ = run(plan_name, "float32")
    captured = tiny.captured(batch, tiny.PLANS[plan_name], "float32")
    assert batch.guides is not None and trajectories.guidance is not None
    valid = np.asarray(batch.guides.valid)
    assert valid.sum() == trajectories.num_tokens - trajectories.num_sequences
    for name, guide in batch.guides.sites.items():
        np.testing.assert_array_equal(np.asarray(guide.data)[:, valid], captured[name].codes[:, valid], err_msg=name)
        np.testing.assert_array_equal(np.asarray(guide.scales)[:, valid], captured[name].scales[:, valid], err_msg=name)
        if plan_name == "per_token":
            np.testing.assert_array_equal(np.asarray(guide.multiplier)[:, valid], captured[name].multiplier[:, valid])
        assert np.mean(np.asarray(guide.data)[:, valid][:, 1:] == captured[name].codes[:, valid][:, :-1]) < 0.5  # the control


@pytest.mark.parametrize("name", slow_but((), list(tiny.PLANS)))
def test_bfloat16_log_probs_stay_within_the_tolerance(name):
    """With the record, and without it: every BF16 rounding is pinned (`keep_rounding`), so the trainer's own codes are the engine's."""
    _, batch, logp, _ = run(name, "bfloat16")
    unguided, _ = tiny.score(replace(batch, guides=None), tiny.guided(tiny.PLANS[name]))
    for right in (tiny.gap(batch, logp), tiny.gap(batch, unguided)):
        assert right.mean() <= 0.01 and np.quantile(right, 0.99) <= 0.05
    for what, control in controls(batch).items():
        wrong = tiny.gap(batch, tiny.score(control, tiny.guided(tiny.PLANS[name]))[0])
        assert wrong.mean() > 0.05, (what, wrong.mean())


def test_an_engine_that_sums_in_shares_is_followed_by_its_record_only():
    """Such an engine rounds other BF16 values to FP4: free rounding misses codes that the record names."""
    engine = EmbeddedEngine(replace(tiny.policy(), partial_sums=2), PLAN, CaptureSpec("codes", RECORDED_SITES, tiny.LAYERS), max_batch=8)
    tiny.sync(engine, 0)
    batch = tiny.batch_of(generate(engine, tiny.requests()))
    followed = tiny.gap(batch, tiny.score(batch, tiny.guided(PLAN))[0])
    free = tiny.gap(batch, tiny.score(replace(batch, guides=None), tiny.guided(PLAN))[0])
    assert followed.mean() <= 0.01 and np.quantile(followed, 0.99) <= 0.05
    assert free.mean() > 3 * followed.mean() and free.mean() > 0.01, (free.mean(), followed.mean())


@pytest.mark.slow
def test_codes_of_decode_and_forward_are_equal_under_the_xla_flag():
    """A stricter form of the above, in a process of its own: no code differs, and log-probs only by the order of a last sum."""
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
    }
    command = [sys.executable, str(Path(__file__).with_name("bit_equality.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["log_probs"] > 50 and result["log_prob_gap"] <= 1e-6
    assert result["codes"] > 10_000 and result["unequal_codes"] == 0
    assert result["unequal_tokens_alone"] == 0 and result["log_prob_gap_alone"] <= 1e-6  # one request in a wave of one
    assert result["unequal_shifted"] > 0.9 * result["log_probs"]
