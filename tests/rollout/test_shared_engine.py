"""The engine that several processes share is an engine; with two processes it is tested in tests/sharding."""

from __future__ import annotations

import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import EngineConformance, answers_of
from trace_jax.rollout import Trajectories
from trace_jax.rollout.shared_engine import SharedEngine

PLAN = tiny.PLANS["nvfp4"]


@pytest.fixture(scope="module")
def engine() -> SharedEngine:
    return SharedEngine(tiny.engine(PLAN, "float32", kind="codes"))


@pytest.fixture(scope="module")
def answers(engine) -> Trajectories:
    return answers_of(engine)


class TestSharedEngine(EngineConformance):
    plan = PLAN
