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

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.rollout import generate
from trace_jax.train.objective import without_guidance

TEMPERATURES = (0.7, 1.0, 1.3, 0.0)
"""One wave mixes them: rows i % 4."""


def run(plan_name, compute_dtype):
    plan = tiny.PLANS[plan_name]
    wave = [replace(request, temperature=TEMPERATURES[i % 4]) for i, request in enumerate(tiny.requests())]
    trajectories = generate(tiny.engine(plan, compute_dtype, kind="codes"), wave)
    trajectories.validate()
    batch = tiny.batch_of(trajectories)
    logp, own = tiny.score(batch, tiny.guided(plan), compute_dtype)
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


@pytest.mark.parametrize("plan_name", ["bf16", "nvfp4", "mxfp4", "per_token"])
def test_mis_04_logp_02_float32_log_probs_and_routes_are_those_of_the_trainer(plan_name):
    """Rows have temperatures 0.7, 1, 1.3 and greedy: the engine reports log-probs after the temperature (LOGP-01)."""
    plan = tiny.PLANS[plan_name]
    _, batch, logp, own = run(plan_name, "float32")
    assert tiny.gap(batch, logp).max() <= 1e-4
    routed = np.asarray(batch.routes).min(-1) >= 0
    np.testing.assert_array_equal(np.sort(own, -1)[routed], np.sort(np.asarray(batch.routes), -1)[routed])
    free = replace(without_guidance(batch), routes=jnp.full_like(np.asarray(batch.routes), -1))
    assert tiny.gap(batch, tiny.score(free, tiny.guided(plan), "float32")[0]).max() <= 1e-4  # own rounding, own routes
    for name, control in controls(batch).items():
        wrong = tiny.gap(batch, tiny.score(control, tiny.guided(plan), "float32")[0])
        assert wrong.max() > 0.05 and wrong.mean() > 1e-3, (name, wrong.mean(), wrong.max())


@pytest.mark.parametrize("plan_name", ["nvfp4", "mxfp4", "per_token"])
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


@pytest.mark.parametrize("plan_name", ["bf16", "nvfp4"])
def test_bfloat16_log_probs_stay_within_the_tolerance(plan_name):
    _, batch, logp, _ = run(plan_name, "bfloat16")
    right = tiny.gap(batch, logp)
    assert right.mean() <= 0.01 and np.quantile(right, 0.99) <= 0.05
    for name, control in controls(batch).items():
        wrong = tiny.gap(batch, tiny.score(control, tiny.guided(tiny.PLANS[plan_name]))[0])
        assert wrong.mean() > 0.05, (name, wrong.mean())


def test_decode_and_forward_are_bit_equal_under_the_xla_flag():
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
    assert result["log_probs"] > 50 and result["unequal_log_probs"] == 0
    assert result["codes"] > 10_000 and result["unequal_codes"] == 0
    assert result["unequal_alone"] == 0  # one request in a wave of one
    assert result["unequal_shifted"] > 0.9 * result["log_probs"]
