"""Engines on Ray: the conformance tests with two embedded engines, and what a pool does beyond one engine."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import EngineConformance, answers_of, sync
from tests.rollout.ray_engines.conftest import ray_setup
from trace_jax.rollout import Trajectories, generate

PLAN = tiny.PLANS["nvfp4"]

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Generator[Any, None, None]:
    pool = ray_setup().engine()
    sync(pool, PLAN, 0, 0, "float32")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def answers(engine) -> Trajectories:
    return answers_of(engine)


class TestRayEngines(EngineConformance):
    plan = PLAN
    tolerance = 1e-4  # other shares are waves of other sizes


def test_two_engines_give_the_trajectories_of_one(engine):
    """Bit for bit where the waves are as large: sixteen requests as two full waves, of one engine or of two."""
    requests = [replace(request, sample_id=i, tokens=request.tokens[:3]) for i, request in enumerate(tiny.requests() * 2)]
    one, two = generate(tiny.engine(PLAN, "float32", kind="codes"), requests), generate(engine, requests)
    two.validate()
    tiny.assert_same_answers(two, one)
    assert one.guidance is not None and two.guidance is not None and one.routes is not None and two.routes is not None
    for name, array in one.guidance.arrays().items():
        np.testing.assert_array_equal(two.guidance.arrays()[name], array, err_msg=name)
    np.testing.assert_array_equal(two.routes.routed_experts, one.routes.routed_experts)
    assert two.sample_id.tolist() == one.sample_id.tolist() and two.group.tolist() == one.group.tolist()
