"""Two tensor-parallel workers against one: the same answers, records and checks, on CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_policy as tiny

from rollout_bridge.engine.engine import VllmEngine
from rollout_bridge.engine.factory import make
from tests.rollout.engine_conformance import collect, sync
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON, W4A4KV4, tiny_setup
from trace_jax.guidance import GuidanceRecord
from trace_jax.quantization.plan import QuantPlan, rollout_plan, trainer_plan
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.rollout.weight_update import LayerUpdate

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]

GUIDED = ("guidance.record=codes", "guidance.layers=all", "train_quant.activations=guided", "train_quant.kv_cache=guided")
REQUESTS = tiny.requests(8, audit=True)


@pytest.fixture(scope="module")
def start(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[..., VllmEngine], None, None]:
    """`start(workers, plan)`: an engine with the weights of seed 0, closed with the module."""
    made: list[VllmEngine] = []

    def start(workers: int, plan: QuantPlan = W4A4KV4) -> VllmEngine:
        overrides = (f"rollout.vllm.tensor_parallel={workers}", "guidance.audit.every=1", *GUIDED)
        made.append(make(tiny_setup(*overrides, plan=plan, directory=tmp_path_factory.mktemp("run"))))
        sync(made[-1], plan, 0, 0, "float32")
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def divided(start: Callable[..., VllmEngine]) -> VllmEngine:
    return start(2)


@pytest.fixture(scope="module")
def answers(start: Callable[..., VllmEngine]) -> Trajectories:
    """One worker's."""
    return generate(start(1), REQUESTS)


def share_of_equal_bytes(a: GuidanceRecord, b: GuidanceRecord, shift: int = 0) -> dict[str, float]:
    """Site -> share of the valid rows' bytes, codes and scales, that agree; `b` moved by some rows."""
    shares = {}
    for name, site in a.sites.items():
        other = b.sites[name]
        pairs = [(site.data, other.data), (site.scales, other.scales)]
        shares[name] = float(np.mean([np.mean(x[a.valid] == np.roll(y, shift, axis=0)[a.valid]) for x, y in pairs]))
    return shares


def test_two_workers_are_one_engine(divided: VllmEngine, answers: Trajectories):
    found = generate(divided, REQUESTS)
    found.validate()
    tiny.assert_same_answers(found, answers, tolerance=1e-4)
    assert found.audit and answers.audit and found.routes and answers.routes
    for mine, theirs in ((found.guidance, answers.guidance), (found.audit.record, answers.audit.record)):
        assert mine is not None and theirs is not None
        np.testing.assert_array_equal(mine.valid, theirs.valid)
        assert int(mine.valid.sum()) == found.num_tokens - found.num_sequences  # no part of a row is missing
        assert set(share_of_equal_bytes(mine, theirs).values()) == {1.0}
        assert max(share_of_equal_bytes(mine, theirs, shift=1).values()) < 0.5
    np.testing.assert_array_equal(found.routes.routed_experts, answers.routes.routed_experts)
    batch = tiny.batch_of(found)
    gap = tiny.gap(batch, tiny.score(batch, trainer_plan(W4A4KV4, "rtn", "rtn", "rtn", "rtn"), "float32")[0])
    control = tiny.gap(batch, tiny.score(batch, tiny.PLANS["bf16"], "float32")[0])
    print(f"two workers: {gap.size} tokens, log-prob gap max {gap.max():.1e}; without rounding mean {control.mean():.1e}")
    assert gap.max() <= 1e-4 and control.mean() > 100 * gap.mean()


def test_every_worker_takes_its_part_of_an_update(divided: VllmEngine, answers: Trajectories):
    """A, B, A: the acknowledgement is that of all workers; a refused update changes none of them."""
    before = generate(divided, REQUESTS)
    sync(divided, W4A4KV4, 1, 1, "float32")
    other = generate(divided, REQUESTS)
    assert not np.array_equal(other.tokens, before.tokens)

    def broken():
        for update in layer_updates(tiny.policy("float32"), W4A4KV4, tiny.params(0), tiny.multipliers(0)):
            yield LayerUpdate(update.layer_id, {name: tensor for name, tensor in update.tensors.items() if "o_proj" not in name})

    with pytest.raises(ValueError, match=r"o_proj.weight is missing \(and 2 more\)"):
        divided.update_weights(broken(), 2)
    tiny.assert_same_answers(generate(divided, REQUESTS), other)
    sync(divided, W4A4KV4, 0, 3, "float32")
    again = generate(divided, REQUESTS)
    np.testing.assert_array_equal(again.tokens, before.tokens)
    np.testing.assert_array_equal(again.logprobs, before.logprobs)


@pytest.mark.parametrize("victim", ["the process that the trainer knows", "one of vLLM's"])
def test_all_workers_end_together(divided: VllmEngine, answers: Trajectories, victim: str, capfd: pytest.CaptureFixture[str]):
    """After kill -9 of any of them another pair takes over, every request is answered, and nobody of the first pair is left."""
    first = descendants(divided)
    own = divided._worker._link.pid  # pyright: ignore[reportAttributeAccessIssue]
    vllm_s = [pid for pid in first if "VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(vllm_s) == 2
    many = [replace(request, sample_id=100 + i, max_new_tokens=40) for i, request in enumerate(REQUESTS)]
    divided.submit(many)
    divided.poll(0.05)
    os.kill(vllm_s[1] if victim == "one of vLLM's" else own, signal.SIGKILL)
    assert sorted(collect(divided, len(many)).sample_id.tolist()) == [request.sample_id for request in many]
    tiny.assert_same_answers(generate(divided, REQUESTS), answers, tolerance=1e-4)
    reason = "one of vLLM's tensor-parallel processes has ended" if victim == "one of vLLM's" else "killed by SIGKILL"
    assert reason in capfd.readouterr().err
    assert divided._worker._link.pid != own  # pyright: ignore[reportAttributeAccessIssue]
    deadline = time.monotonic() + 30
    while left := [pid for pid in first if Path(f"/proc/{pid}/stat").exists() and state(pid) != "Z"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.parametrize("plan", [rollout_plan("bf16", "bf16", "bf16", "bf16")], ids=["bf16"])
def test_unquantized_experts_are_divided_as_well(start: Callable[..., VllmEngine], plan: QuantPlan):
    found = generate(start(2, plan), tiny.requests())
    batch = tiny.batch_of(found)
    gap = tiny.gap(batch, tiny.score(batch, tiny.PLANS["bf16"], "float32")[0])
    print(f"two workers, unquantized: {gap.size} tokens, log-prob gap max {gap.max():.1e}")
    assert gap.max() <= 1e-4


def descendants(engine: VllmEngine) -> set[int]:
    """The engine's process and all that it started."""
    found = {engine._worker._link.pid}  # pyright: ignore[reportAttributeAccessIssue]
    parents = {int(path.name): int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1]) for path in processes()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit() and os.access(path / "stat", os.R_OK)]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
