"""How old a token can be when rollout and training alternate: what the loop itself does, against the bound that the config states."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from trace_jax.train import rl
from trace_jax.train.checkpoint import Progress
from trace_jax.train.clock import Clock
from trace_jax.train.rl import make_learner, rl_step
from trace_jax.train.setup import calibrated, initial_policy
from trace_jax.train.state import initial_state

STEPS = 4
FOUR_PROMPTS = ("rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_new_tokens=2", "train.micro_batch_tokens=128")


@pytest.fixture(scope="module")
def parts(make_config):
    config = make_config(*FOUR_PROMPTS, "guidance.audit.every=0", "train.unguided_every=0")
    setup, params, _ = initial_policy(config)
    yield config, setup, params, calibrated(setup, params)
    setup.task.close()


def ages(parts, monkeypatch, every, updates, refused=()):
    """`sync/staleness` of each step, and the bound; the updates with the numbers in `refused` have a gradient that is not finite."""
    config, setup, params, multipliers = parts
    changed = {"sync": {"every": every, "max_staleness": every + updates - 2}, "train": {"updates_per_batch": updates}}
    config = config.model_validate(
        {name: value | changed.get(name, {}) if isinstance(value, dict) else value for name, value in config.model_dump().items()}
    )
    setup = replace(setup, config=config)
    count = iter(range(1000))

    def measured(*args, **settings):
        found = rl_measure(*args, **settings)
        if settings.get("advantages") is not None and next(count) in refused:
            return replace(found, gradient=jax.tree.map(lambda leaf: leaf * np.nan, found.gradient))
        return found

    rl_measure = rl.measure
    monkeypatch.setattr(rl, "measure", measured)
    learner = make_learner(setup, initial_state(params, rl.make_optimizer(config.optimizer), multipliers), Progress(), setup.engine())
    found = [int(rl_step(learner, Clock())[0]["sync/staleness"]) for _ in range(STEPS)]
    monkeypatch.undo()
    return found, config.least_staleness


@pytest.mark.parametrize(("every", "updates"), [(1, 1), (3, 1), (1, 3), (2, 2), (3, 2), (2, 4), (4, 3)])
def test_the_oldest_token_of_an_alternating_run(parts, monkeypatch, every, updates):
    """Where no update is refused, a batch begins with weights at most `every` less the common divisor old."""
    found, bound = ages(parts, monkeypatch, every, updates)
    assert max(found) == every - math.gcd(every, updates) + updates - 1 <= bound


def test_the_bound_is_reached(parts, monkeypatch):
    """A refused update shifts the transfers against the batches; without one, two updates of a batch and a transfer after two never
    differ by more than one."""
    assert ages(parts, monkeypatch, 2, 2) == ([1] * STEPS, 2)
    assert ages(parts, monkeypatch, 2, 2, refused=(0,)) == ([0, 2, 2, 2], 2)
