"""The vLLM engine in other formats than NVFP4 throughout: weights come by updates, and the engine says what it really executes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_policy as tiny

from rollout_bridge.engine.engine import VllmEngine
from rollout_bridge.engine.factory import make
from tests.rollout.engine_conformance import sync
from tests.rollout_bridge.engine.script_answers import kill
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON, tiny_setup
from trace_jax.quantization.plan import QuantPlan, rollout_plan, trainer_plan
from trace_jax.rollout import generate
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.train.setup import Setup, compensated

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]

PLANS = {
    "W4A16KV4": rollout_plan("nvfp4", "bf16", "nvfp4", "nvfp4"),
    "MXFP4": rollout_plan("mxfp4", "mxfp4", "bf16", "bf16"),
    "MXFP4-W4A16": rollout_plan("mxfp4", "bf16", "bf16", "bf16"),
}


def trained(plan: QuantPlan) -> QuantPlan:
    """The trainer's forward with the formats of a rollout."""
    return trainer_plan(plan, "rtn", "rtn", "rtn", "rtn")


@pytest.fixture
def start(installed: None, tmp_path: Path) -> Generator[Callable[[Setup], VllmEngine], None, None]:
    """Starts engines, and closes them with the test."""
    made: list[VllmEngine] = []

    def start(setup: Setup) -> VllmEngine:
        made.append(make(replace(setup, directory=tmp_path)))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", PLANS)
def test_log_probs_of_updated_weights_are_the_trainer_s(start, name: str):
    plan = PLANS[name]
    engine = start(tiny_setup(plan=plan))
    for seed, version in ((1, 0), (0, 1)):
        sync(engine, plan, seed, version, "float32")
    told = engine.capabilities()
    formats = plan.weights, plan.expert_input.format, plan.k.format, plan.v.format
    assert (told.weights, told.activations, told.k, told.v) == formats and "emulated" in told.backend
    batch = tiny.batch_of(generate(engine, tiny.requests()))
    assert plan.weights != "nvfp4_4over6"  # vLLM serves none
    other = "bf16" if plan.expert_input.format == plan.weights else plan.weights
    gap = tiny.gap(batch, tiny.score(batch, trained(plan), "float32")[0])
    wrong = rollout_plan(plan.weights, other, plan.k.format, plan.v.format)
    control = tiny.gap(batch, tiny.score(batch, trained(wrong), "float32")[0])
    print(f"{name}: {gap.size} tokens, log-prob gap max {gap.max():.1e}; with activations {other} mean {control.mean():.1e}")
    assert gap.max() <= 1e-4 and control.mean() > 0.01


def test_compensated_channels_are_chosen_once(start):
    """Three quarters of the channels: nearer to unrounded activations than to rounded ones, and the same after another worker has come."""
    config = replace(tiny.CONFIG, vocab_size=131)  # that of the tokenizer, whose prompts choose the channels
    plan = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
    setup = tiny_setup("rollout.residual_compensation.fraction=0.75", plan=plan)
    setup = replace(setup, policy=tiny.policy("float32", config))
    setup = compensated(setup, tiny.params(1, config), tiny.multipliers(1, config))
    engine = start(setup)
    for seed, version in ((1, 0), (0, 1)):
        updates = layer_updates(setup.policy, plan, tiny.params(seed, config), tiny.multipliers(seed, config))
        assert engine.update_weights(updates, version).version == version
    assert "residual of 75 % of the input channels compensated" in engine.capabilities().backend
    answers = generate(engine, tiny.requests())
    batch = tiny.batch_of(answers)
    gaps = [
        tiny.gap(batch, tiny.score(batch, trained(replace(plan, expert_input=site, down_input=site)), "float32", config)[0]).mean()
        for site in (plan.expert_input, plan.k)
    ]
    print(f"mean log-prob gap to W4A4 {gaps[0]:.4f}, to W4A16 {gaps[1]:.4f}")
    assert gaps[0] > gaps[1] > 1e-4
    kill(engine)
    tiny.assert_same_answers(generate(engine, tiny.requests()), answers, tolerance=1e-4)
