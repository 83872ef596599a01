"""QUADS' compensated products in the embedded engine: log-probs of the equation, nearer to unrounded inputs, token by token."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_policy as tiny

from pallas_kernels import NVFP4, fake_quant
from trace_jax.models import layer_scope
from trace_jax.quantization.plan import rollout_plan, trainer_plan
from trace_jax.rollout import generate
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs

PLAN = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
W4A16 = trainer_plan(PLAN, "rtn", "none", "none", "none")
HALF = {"expert_input": np.r_[0:16, 40:56], "down_input": np.arange(8, 24)}
ALL = {"expert_input": np.arange(64), "down_input": np.arange(32)}


def compensating(channels: dict[str, np.ndarray], experts: str = "dense") -> EmbeddedEngine:
    """An engine with these channels in every layer."""
    policy = replace(tiny.policy("float32"), experts_implementation=experts)
    per_layer = {site: np.tile(ids.astype(np.int32), (len(tiny.LAYERS), 1)) for site, ids in channels.items()}
    engine = EmbeddedEngine(policy, PLAN, CaptureSpec("codes", ("expert_input",), (0,)), 8, per_layer)
    tiny.sync(engine, 0)
    return engine


@pytest.fixture(scope="module")
def half():
    return compensating(HALF, "ragged")


@pytest.fixture(scope="module")
def answers(half):
    return generate(half, tiny.requests())


def test_log_probs_are_those_of_the_equation(answers, monkeypatch: pytest.MonkeyPatch):
    """The trainer's forward with X replaced by Q(X) + Q(R[C]) at both inputs of the experts."""
    original, batch = layer_scope.round_site, tiny.batch_of(answers)
    plain = tiny.gap(batch, tiny.score(batch, PLAN, "float32")[0])

    def compensated(site, x, plan, multiplier, **choices):
        rounded, captured = original(site, x, plan, multiplier, **choices)
        if site in HALF:
            left = (x - rounded)[..., HALF[site]]
            rounded = rounded.at[..., HALF[site]].add(fake_quant(left, NVFP4, multiplier / 4))
        return rounded, captured

    monkeypatch.setattr(layer_scope, "round_site", compensated)
    spec = ObjectiveSpec(replace(tiny.policy("float32"), experts_implementation="ragged"), PLAN)
    forward = jax.jit(lambda masters, scales, batch: batch_logprobs(masters, scales, batch, spec)[0])
    found = tiny.gap(batch, np.asarray(forward(tiny.params(), tiny.multipliers(), batch)))
    assert found.max() <= 1e-4 and plain.mean() > 0.01


def test_log_probs_are_nearer_to_unrounded_inputs_the_more_is_compensated(answers):
    everything = generate(compensating(ALL), tiny.requests())
    gaps = []
    for generated in (answers, everything):
        batch = tiny.batch_of(generated)
        gaps.append(tiny.gap(batch, tiny.score(batch, W4A16, "float32")[0]).mean())
    rounded, exact = (tiny.score(batch, plan, "float32")[0] for plan in (PLAN, W4A16))
    none = np.abs(rounded - exact)[np.asarray(batch.sampled)].mean()
    print(f"mean gap to W4A16 without, half, all compensated: {none:.4f} {gaps[0]:.4f} {gaps[1]:.4f}")
    assert none > gaps[0] > gaps[1] and gaps[1] < 0.3 * none


def test_neighbours_do_not_change_an_answer(half, answers):
    others = [replace(request, tokens=(request.tokens + 1) % 97, seed=3 * i) for i, request in enumerate(tiny.requests())]
    mine = [request if i in (2, 5) else other for i, (request, other) in enumerate(zip(tiny.requests(), others, strict=True))]
    tiny.assert_same_answers(generate(half, mine).select([2, 5]), answers.select([2, 5]))


def test_it_says_what_it_compensates_and_records_the_codes_of_the_values(half, answers):
    assert half.capabilities().residual_fraction == 0.5
    site = answers.guidance.sites["expert_input"]
    assert site.data.shape[-1] == 32 and site.scales.shape[-1] == 4
