"""Engines on several hosts, each with an object store of its own: a host is lost in the middle of a rollout, and another one joins.

The hosts are nodes of Ray's own test cluster, which are separate processes on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import collect, sync
from tests.rollout.ray_engines.conftest import ray_setup
from tests.rollout.ray_engines.test_lost_engines import many
from trace_jax.errors import UserError
from trace_jax.rollout import Trajectories, generate

PLAN = tiny.PLANS["nvfp4"]

# The test cluster forks where JAX is there already; see `cluster` for why that is safe.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")]


@pytest.fixture(scope="module")
def hosts(require: Callable[[str], ModuleType]) -> Generator[Any, None, None]:
    """A head that runs no engine, and two hosts with room for one engine each."""
    require("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
    yield made
    made.shutdown()


def add_host(hosts: Any) -> Any:
    return hosts.add_node(num_cpus=1, object_store_memory=100 << 20)


def test_a_lost_host_is_replaced_by_one_that_joins(hosts: Any, capfd: pytest.CaptureFixture[str]):
    add_host(hosts)
    second = add_host(hosts)
    pool = ray_setup(f"rollout.ray.address={hosts.address}", "rollout.ray.num_cpus=1").engine()
    try:
        sync(pool, PLAN, 0, 4, "float32")
        wanted = generate(tiny.engine(PLAN, "float32", kind="codes"), many())
        tiny.assert_same_answers(generate(pool, many()), wanted, tolerance=1e-4)
        pool.submit(many())
        first = collect(pool, 1)
        hosts.remove_node(second)
        add_host(hosts)
        both = Trajectories.concat([first, collect(pool, 48 - first.num_sequences)])
        assert "was lost" in capfd.readouterr().err
        assert sorted(both.sample_id.tolist()) == [request.sample_id for request in many()] and set(both.weight_version) == {4}
        tiny.assert_same_answers(both.select(both.sample_id.argsort()), wanted, tolerance=1e-4)
    finally:
        pool.close()


def test_a_cluster_that_does_not_answer():
    with pytest.raises(UserError, match="^rollout.ray.address 127.0.0.1:9: .*; see `ray status`$"):
        ray_setup("rollout.ray.address=127.0.0.1:9").engine()
