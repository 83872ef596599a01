"""The vLLM engine with vLLM on CPU: the conformance tests, and kill -9 in the middle of a rollout."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_policy as tiny

from rollout_bridge.engine.engine import VllmEngine
from rollout_bridge.engine.factory import make
from tests.rollout.engine_conformance import EngineConformance, answers_of, collect, sync
from tests.rollout_bridge.engine.script_answers import kill
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON, W4A4KV4, tiny_setup
from trace_jax.quantization.plan import QuantPlan, trainer_plan
from trace_jax.rollout import Trajectories, generate

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]


@pytest.fixture(scope="module")
def engine(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmEngine, None, None]:
    made = make(tiny_setup(directory=tmp_path_factory.mktemp("run")))
    sync(made, W4A4KV4, 0, 0, "float32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers(engine: VllmEngine) -> Trajectories:
    return answers_of(engine)


class TestVllmEngine(EngineConformance):
    plan = W4A4KV4
    tolerance = 1e-4

    def trainer_plan(self) -> QuantPlan:
        return trainer_plan(W4A4KV4, "rtn", "rtn", "rtn", "rtn")


def test_kill_9_in_the_middle_of_a_rollout(engine: VllmEngine, answers: Trajectories, capfd: pytest.CaptureFixture[str]):
    """The next worker gets the weights of the last update, and every answer is the one it would have been."""
    many = [replace(request, sample_id=100 + i, max_new_tokens=60) for i, request in enumerate(tiny.requests() * 4)]
    undisturbed = generate(engine, many)
    sync(engine, W4A4KV4, 1, 5, "float32")
    sync(engine, W4A4KV4, 0, 6, "float32")
    engine.submit([replace(request, max_new_tokens=3 if i < 6 else 60) for i, request in enumerate(many)])
    first = collect(engine, 6)
    kill(engine)
    rest = collect(engine, 32 - first.num_sequences)
    assert "killed by SIGKILL" in capfd.readouterr().err
    both = Trajectories.concat([first, rest])
    assert sorted(both.sample_id.tolist()) == [request.sample_id for request in many] and set(both.weight_version) == {6}
    long = rest.select([index for index, sample in enumerate(rest.sample_id) if sample >= 106])
    tiny.assert_same_answers(long, undisturbed.select([int(sample) - 100 for sample in long.sample_id]), tolerance=1e-4)
    tiny.assert_same_answers(generate(engine, tiny.requests()), answers, tolerance=1e-4)


def test_its_log_lies_in_the_run_s_folder(engine: VllmEngine):
    log = Path(engine._worker._link._how.log)  # pyright: ignore[reportAttributeAccessIssue]
    assert log.name == "vllm.log" and "Loading weights" in log.read_text()
