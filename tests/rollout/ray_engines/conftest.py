"""A small Ray cluster on this machine, and pools of real engines on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import pytest

from tests.rollout_bridge.engine.tiny_setup import tiny_setup
from trace_jax.train.setup import Setup

OVERRIDES = (
    "method=trace",
    "rollout.engine=jax",
    "rollout.launcher=ray",
    "rollout.engines=2",
    "rollout.max_batch=8",
    "rollout.ray.num_cpus=0.5",
    "rollout.ray.object_store_gib=0.1",
    "guidance.record=codes",
    "guidance.layers=all",
)

StartPool = Callable[..., Any]


def ray_setup(*overrides: str) -> Setup:
    """The tiny policy as the setup of a run with two embedded engines."""
    return tiny_setup(*OVERRIDES, *overrides)


@pytest.fixture(scope="module")
def ray_cluster(require: Callable[[str], ModuleType], environment: dict[str, str]) -> Generator[None, None, None]:
    """The cluster that the product starts, kept for all pools of a module."""
    require("ray")
    from trace_jax.rollout.ray_engines.cluster import cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", *(name for name in environment if name.startswith("JAX_"))):
            patch.setenv(name, environment[name])
        with cluster(ray_setup("rollout.engines=4").config):
            yield


@pytest.fixture
def start_pool(ray_cluster: None) -> Generator[StartPool, None, None]:
    """`start_pool(*overrides)`: a pool without weights, closed after the test."""
    pools: list[Any] = []

    def start(*overrides: str) -> Any:
        pools.append(ray_setup(*overrides).engine())
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def process_of(pool: Any, number: int) -> int:
    """The process of an engine."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.get(pool._members[number].actor.__ray_call__.remote(lambda actor: os.getpid()))
