"""Engines on Ray that are killed, refuse, or differ: nothing lost, nothing twice, and a clear line where it cannot go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import collect, sync
from tests.rollout.ray_engines.conftest import StartPool, process_of, ray_setup
from trace_jax.errors import UserError
from trace_jax.rollout import Ack, FinishReason, Request, Trajectories, UpdateDigest, generate
from trace_jax.rollout.weight_sync import layer_updates

PLAN = tiny.PLANS["nvfp4"]

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Generator[Any, None, None]:
    pool = ray_setup("rollout.ray.max_restarts=5").engine()
    sync(pool, PLAN, 0, 0, "float32")
    yield pool
    pool.close()


def many(count: int = 48) -> list[Request]:
    """Six waves."""
    eight = tiny.requests()
    return [replace(eight[i % 8], sample_id=100 + i, seed=i, max_new_tokens=60) for i in range(count)]


def kill(pool: Any, number: int) -> None:
    os.kill(process_of(pool, number), signal.SIGKILL)


def test_kill_9_in_the_middle_of_a_rollout(engine: Any, capfd: pytest.CaptureFixture[str]):
    """The next engine gets the weights of the last update, and every answer is the one it would have been."""
    undisturbed = generate(engine, many())
    sync(engine, PLAN, 1, 5, "float32")
    sync(engine, PLAN, 0, 6, "float32")
    victim = process_of(engine, 0)
    engine.submit(many())
    first = collect(engine, 1)
    os.kill(victim, signal.SIGKILL)
    rest = collect(engine, 48 - first.num_sequences)
    said = capfd.readouterr().err
    assert "rollout engine 0 was lost" in said and "Ray starts it again" in said and " 0 requests" not in said
    both = Trajectories.concat([first, rest])
    assert sorted(both.sample_id.tolist()) == [request.sample_id for request in many()] and set(both.weight_version) == {6}
    tiny.assert_same_answers(both.select(both.sample_id.argsort()), undisturbed, tolerance=1e-4)
    assert engine.poll(0.5).num_sequences == 0 and engine.health().pending == 0 and process_of(engine, 0) != victim


def test_an_engine_that_dies_between_two_calls(engine: Any):
    """Found by the next call to it, whether that is work or an update; the new weights are those of the update."""
    undisturbed = generate(engine, tiny.requests())
    kill(engine, 1)
    tiny.assert_same_answers(generate(engine, tiny.requests()), undisturbed, tolerance=1e-4)
    engine.submit(tiny.requests())
    kill(engine, 0)
    sync(engine, PLAN, 1, 7, "float32")
    other = collect(engine, 8)
    assert set(other.weight_version) == {7} and not np.array_equal(other.tokens, undisturbed.tokens)
    sync(engine, PLAN, 0, 8, "float32")


@pytest.mark.slow
def test_an_engine_that_dies_before_an_abort_or_a_pause(engine: Any):
    undisturbed = generate(engine, tiny.requests())
    engine.submit(tiny.requests())
    kill(engine, 0)
    engine.abort(range(8))
    assert set(collect(engine, 8).finish_reason) == {FinishReason.ABORTED}
    engine.submit(tiny.requests())
    kill(engine, 1)
    engine.pause()
    assert engine.poll(0.1).num_sequences == 0
    engine.resume()
    tiny.assert_same_answers(collect(engine, 8), undisturbed, tolerance=1e-4)


def test_a_sample_that_was_aborted_may_be_submitted_again_at_once(engine: Any):
    undisturbed = generate(engine, many(24))
    engine.submit(many(24))
    engine.poll(0.0)  # the first waves run, the rest waits in the engines
    with pytest.raises(ValueError, match="sample 100 is pending already"):
        engine.submit(many(1))
    engine.abort(range(100, 124))
    first = engine.poll(0.0)
    assert sorted(first.sample_id) == list(range(100, 124)) and FinishReason.ABORTED in first.finish_reason
    tiny.assert_same_answers(generate(engine, many(24)), undisturbed, tolerance=1e-4)


def test_every_engine_acknowledges_the_same_bytes(engine: Any):
    from trace_jax.rollout.ray_engines.weights import store

    digest, updates = UpdateDigest(), layer_updates(tiny.policy("float32"), PLAN, tiny.params(1), tiny.multipliers(1))
    acks, errors = engine._equip_all(store(digest.observe(updates), 9))
    assert acks == [digest.ack(9)] * 2 and not errors
    sync(engine, PLAN, 0, 10, "float32")


def test_an_update_that_one_engine_refuses_changes_none(engine: Any):
    answers, version = generate(engine, tiny.requests()), engine.health().version
    instead(engine, 1, ValueError("does not fit here"))
    with pytest.raises(ValueError, match="^does not fit here$"):
        sync(engine, PLAN, 1, 11, "float32")
    instead(engine, 1, None)
    assert engine.health().version == version
    tiny.assert_same_answers(generate(engine, tiny.requests()), answers)


def test_a_cluster_without_room(start_pool: StartPool):
    wanted = "^0 of rollout.engines=3 engines started within rollout.ray.start_timeout_s=1; each engine asks for 9 CPUs and 0 GPUs, and "
    with pytest.raises(UserError, match=wanted):
        start_pool("rollout.engines=3", "rollout.ray.num_cpus=9", "rollout.ray.start_timeout_s=1")


def test_a_run_still_stops_after_its_step(ray_cluster: None):
    """`ray.init` would end the program at SIGTERM."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_engine_that_is_lost_for_good(start_pool: StartPool):
    pool = start_pool("rollout.engines=1", "rollout.ray.max_restarts=0")
    sync(pool, PLAN, 0, 0, "float32")
    kill(pool, 0)
    wanted = r"died with 8 of 8 requests unfinished: rollout engine 0 is lost for good after rollout.ray.max_restarts=0 new starts: "
    with pytest.raises(RuntimeError, match=wanted):
        generate(pool, tiny.requests())
    with pytest.raises(RuntimeError, match="lost for good"):
        sync(pool, PLAN, 1, 1, "float32")
    assert not pool.health().alive and pool.health().version == 0


def test_an_engine_that_acknowledges_other_bytes(engine: Any):
    """The last test of the module: it ends the pool."""
    instead(engine, 1, Ack(7, "0" * 16, 12))
    with pytest.raises(RuntimeError, match="the rollout engines acknowledge different weights: Ack.*, Ack"):
        sync(engine, PLAN, 1, 12, "float32")
    with pytest.raises(RuntimeError, match="different weights"):
        engine.submit(tiny.requests())
    assert not engine.health().alive


def instead(pool: Any, number: int, outcome: Exception | Ack | None) -> None:
    """What an engine says to new weights from now on; None lets it take them again."""
    import ray  # pyright: ignore[reportMissingImports]

    def change(actor: Any) -> None:
        def update(updates: Any, version: int) -> Ack:
            if isinstance(outcome, Ack):
                return outcome
            raise outcome

        actor._made.__dict__.pop("update_weights", None)
        if outcome is not None:
            actor._made.update_weights = update

    ray.get(pool._members[number].actor.__ray_call__.remote(change))
