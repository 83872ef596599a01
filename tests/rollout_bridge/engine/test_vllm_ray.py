"""Two vLLM engines on Ray, on CPU: the answers of one, and kill -9 of an actor, whose vLLM process ends with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import collect, sync
from tests.rollout.ray_engines.conftest import process_of
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON, W4A4KV4, tiny_setup
from trace_jax.rollout import Request, Trajectories, generate

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.skipif(not INTERPRETER, reason=REASON)]

OVERRIDES = ("rollout.launcher=ray", "rollout.engines=2", "rollout.ray.num_cpus=0.5", "rollout.ray.object_store_gib=0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def engine(installed: None, require: Callable[[str], ModuleType], folder: Path) -> Generator[Any, None, None]:
    require("ray")
    pool = tiny_setup(*OVERRIDES, directory=folder).engine()
    sync(pool, W4A4KV4, 0, 0, "float32")
    yield pool
    pool.close()


def many(count: int = 32) -> list[Request]:
    return [replace(request, sample_id=100 + i, max_new_tokens=60) for i, request in enumerate(tiny.requests() * (count // 8))]


def test_two_engines_give_the_answers_of_one_and_a_lost_one_is_replaced(engine: Any, folder: Path, capfd: pytest.CaptureFixture[str]):
    alone = tiny_setup().engine()
    sync(alone, W4A4KV4, 0, 0, "float32")
    wanted = generate(alone, many())
    alone.close()
    tiny.assert_same_answers(generate(engine, many()), wanted, tolerance=1e-4)
    sync(engine, W4A4KV4, 1, 5, "float32")
    sync(engine, W4A4KV4, 0, 6, "float32")
    victim = psutil.Process(process_of(engine, 0))
    workers = victim.children(recursive=True)
    assert any("vllm_plugin.serve" in " ".join(worker.cmdline()) for worker in workers)
    engine.submit([replace(request, max_new_tokens=3 if i < 6 else 60) for i, request in enumerate(many())])
    first = collect(engine, 6)
    os.kill(victim.pid, signal.SIGKILL)
    rest = collect(engine, 32 - first.num_sequences)
    assert "rollout engine 0 was lost" in capfd.readouterr().err
    both = Trajectories.concat([first, rest])
    assert sorted(both.sample_id.tolist()) == [request.sample_id for request in many()] and set(both.weight_version) == {6}
    long = rest.select([index for index, sample in enumerate(rest.sample_id) if sample >= 106])
    tiny.assert_same_answers(long, wanted.select([int(sample) - 100 for sample in long.sample_id]), tolerance=1e-4)
    deadline = time.monotonic() + 30
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline, "a vLLM process outlives its actor"
        time.sleep(0.5)
    assert "Loading weights" in (folder / "engine_0" / "vllm.log").read_text()
