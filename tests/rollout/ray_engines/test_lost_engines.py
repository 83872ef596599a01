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
from trace_jax.rollout import Ack, FinishReason, Health, Request, Trajectories, UpdateDigest, generate
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


def test_an_engine_that_cannot_be_reached_for_a_while(engine: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Ray says then what it says of a dead one, but its process lives, with its requests: it must not answer beside its successor.

    Without the replacement the engine refuses the requests that come again, as pending already.
    """
    from ray.exceptions import ActorUnavailableError  # pyright: ignore[reportMissingImports]

    from trace_jax.rollout.ray_engines import member

    undisturbed = generate(engine, many())
    before, lost = [process_of(engine, number) for number in (0, 1)], engine._members[1]
    engine.submit(many())
    engine.poll(0.0)
    assert lost.call is not None and len(lost.fresh) < len(lost.pending)
    get, unreachable = member.ray.get, lost.call

    def get_or_not(reference: Any, **options: Any) -> Any:
        if reference is unreachable:
            raise ActorUnavailableError("The actor is temporarily unavailable", None)
        return get(reference, **options)

    monkeypatch.setattr(member.ray, "get", get_or_not)
    answers = collect(engine, 48)
    monkeypatch.undo()
    assert sorted(answers.sample_id.tolist()) == [request.sample_id for request in many()]
    tiny.assert_same_answers(answers.select(answers.sample_id.argsort()), undisturbed, tolerance=1e-4)
    assert engine.poll(0.5).num_sequences == 0 and engine.health().pending == 0
    said = capfd.readouterr().err
    assert "unavailable" in said and "it is there again, with requests that count as lost" in said
    assert process_of(engine, 0) == before[0] and process_of(engine, 1) != before[1]


@pytest.mark.slow
def test_an_engine_that_hangs(start_pool: StartPool, capfd: pytest.CaptureFixture[str]):
    """In its work, and before an update: killed and replaced after the time; one loss costs one of the new starts."""
    pool = start_pool("rollout.ray.silence_timeout_s=30", "rollout.ray.max_restarts=1")
    sync(pool, PLAN, 0, 0, "float32")
    undisturbed = generate(pool, many())
    pool.submit(many())
    first = collect(pool, 1)
    os.kill(process_of(pool, 0), signal.SIGSTOP)
    both = Trajectories.concat([first, collect(pool, 48 - first.num_sequences)])
    assert "rollout engine 0 was lost: it does not answer in time" in capfd.readouterr().err
    assert sorted(both.sample_id.tolist()) == [request.sample_id for request in many()]
    tiny.assert_same_answers(both.select(both.sample_id.argsort()), undisturbed, tolerance=1e-4)
    pool._limit = 30.0  # of an update, as of a start
    os.kill(process_of(pool, 1), signal.SIGSTOP)
    sync(pool, PLAN, 1, 1, "float32")
    assert "rollout engine 1 was lost: it does not answer in time" in capfd.readouterr().err
    assert set(generate(pool, tiny.requests()).weight_version) == {1}


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
    instead(engine, 1, "update_weights", ValueError("does not fit here"))
    with pytest.raises(ValueError, match="^does not fit here$"):
        sync(engine, PLAN, 1, 11, "float32")
    instead(engine, 1, "update_weights", None)
    assert engine.health().version == version
    tiny.assert_same_answers(generate(engine, tiny.requests()), answers)


def test_requests_that_one_engine_refuses(engine: Any):
    """Everything given to it is aborted, what the other one has is answered, and both go on."""
    answers = generate(engine, tiny.requests())
    instead(engine, 1, "submit", UserError("the prompt 3 is too long"))
    engine.submit(tiny.requests())
    with pytest.raises(UserError, match="^the prompt 3 is too long$"):
        while engine.health().pending:
            assert engine.poll(5.0).num_sequences
    instead(engine, 1, "submit", None)
    rest = collect(engine, engine.health().pending)
    assert 4 <= rest.num_sequences and np.sum(rest.finish_reason == FinishReason.ABORTED) == 4 and engine.health().pending == 0
    tiny.assert_same_answers(generate(engine, tiny.requests()), answers)


@pytest.mark.slow
def test_an_engine_that_fails_or_ends(start_pool: StartPool):
    pool = start_pool("rollout.engines=1")
    sync(pool, PLAN, 0, 0, "float32")
    instead(pool, 0, "poll", ArithmeticError("out of numbers"))
    with pytest.raises(RuntimeError, match="^rollout engine 0 failed: out of numbers$"):
        generate(pool, tiny.requests())
    ended = start_pool("rollout.engines=1")
    sync(ended, PLAN, 0, 0, "float32")
    instead(ended, 0, "poll", Trajectories.empty())
    instead(ended, 0, "health", Health(False, "its own process is dead", 8, False, 0))
    with pytest.raises(RuntimeError, match="died with 8 of 8 requests unfinished: rollout engine 0 died: its own process is dead$"):
        generate(ended, tiny.requests())


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
    instead(engine, 1, "update_weights", Ack(7, "0" * 16, 12))
    with pytest.raises(RuntimeError, match="the rollout engines acknowledge different weights: Ack.*, Ack"):
        sync(engine, PLAN, 1, 12, "float32")
    with pytest.raises(RuntimeError, match="different weights"):
        engine.submit(tiny.requests())
    assert not engine.health().alive


def instead(pool: Any, number: int, method: str, outcome: Any) -> None:
    """What a method of an engine raises or returns from now on; None lets it do its work again."""
    import ray  # pyright: ignore[reportMissingImports]

    def change(actor: Any) -> None:
        def changed(*arguments: Any) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        actor._made.__dict__.pop(method, None)
        if outcome is not None:
            setattr(actor._made, method, changed)

    ray.get(pool._members[number].actor.__ray_call__.remote(change))
