"""Generation ahead of training: batches in order, never too old, each answer once; what goes wrong reaches the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from tests.rollout.timed_engine import TimedEngine, weights
from trace_jax.errors import UserError
from trace_jax.rollout import Request, Trajectories
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.stream import MAX_ATTEMPTS, RolloutStream

SIZE = 4
"""Answers of a batch, in two groups."""


def requests(number: int) -> list[Request]:
    """The first answer of a batch takes one poll, the last seven."""
    return [
        Request(sample, sample // 2, sample // 2 * 2, np.zeros(2, np.int32), 1 + 2 * (sample % SIZE))
        for sample in range(number * SIZE, (number + 1) * SIZE)
    ]


def score(number: int, trajectories: Trajectories) -> Scored:
    reward = np.full(trajectories.num_sequences, number, np.float32)
    return Scored(trajectories.replace(reward=reward), reward > 0, reward, 0)


@pytest.fixture
def make() -> Generator[Any, None, None]:
    """`make(engine, ...)`: a stream, closed with the test."""
    made: list[RolloutStream] = []

    def stream(engine: TimedEngine, scoring=score, **settings: Any) -> RolloutStream:
        settings = {"first": 0, "version": 0, "updates": 1, "max_staleness": 2} | settings
        made.append(RolloutStream(engine, requests, scoring, **settings))
        return made[-1]

    yield stream
    for each in made:
        each.close()


def settle(engine: TimedEngine) -> None:
    """Waits until the engine has nothing to do for a while."""
    quiet = 0
    while quiet < 5:
        quiet = quiet + 1 if not engine.health().pending else 0
        time.sleep(0.01)


@pytest.mark.parametrize(("updates", "every", "max_staleness"), [(1, 1, 1), (1, 1, 3), (3, 1, 4), (2, 3, 6), (1, 4, 4)])
@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_no_token_is_older_than_allowed_and_every_answer_comes_once(make, updates, every, max_staleness, step_s):
    """A trainer of uneven speed that refuses some updates. The control: without refusals the bound is reached."""
    rng = np.random.default_rng(updates + 10 * every)
    engine = TimedEngine(step_s)
    stream = make(engine, updates=updates, max_staleness=max_staleness)
    version, served, ages, last = 0, 0, [], 12
    for number in range(last):
        batch = stream.take(version, last - number)
        answers = batch.scored.trajectories
        assert answers.sample_id.tolist() == list(range(number * SIZE, (number + 1) * SIZE))
        assert batch.regenerated == 0 and batch.seconds >= 0 and set(batch.scored.reward) == {number}
        for update in range(updates):
            ages.append(version - int(answers.weight_version.min()))
            time.sleep(float(rng.uniform(0, 0.004)))
            version += number % 5 != 4 or update > 0
            if version - served >= every:
                stream.offer(weights(version), version)
                served = version
    assert max(ages) <= max_staleness
    assert len(engine.began) == last * SIZE and not engine.health().pending  # nothing was begun that is not needed
    if step_s == 0.0 and every == 1:
        assert max(ages) == max_staleness


def test_generation_waits_for_the_trainer(make):
    """How far it runs ahead is what the staleness allows: batches 0 to 2 under version 0, one more with every update."""
    engine = TimedEngine()
    stream = make(engine, max_staleness=2)
    assert not engine.threads  # nothing happens before the first batch is asked for
    for number in range(4):
        stream.take(number, 100)
        settle(engine)
        assert len(engine.began) == (number + 3) * SIZE and stream.waiting == 2
        stream.offer(weights(number + 1), number + 1)
        settle(engine)
        assert stream.version == number + 1 and len(engine.began) == (number + 4) * SIZE
    assert engine.threads and threading.main_thread() not in engine.threads


def test_with_no_room_for_staleness_they_alternate(make):
    engine = TimedEngine()
    stream = make(engine, updates=2, max_staleness=1)
    for number in range(3):
        batch = stream.take(2 * number, 100).scored.trajectories
        settle(engine)
        assert set(batch.weight_version) == {2 * number} and len(engine.began) == (number + 1) * SIZE
        for version in (2 * number + 1, 2 * number + 2):
            stream.offer(weights(version), version)


def test_sequences_go_on_under_new_weights_and_say_so(make):
    engine = TimedEngine(step_s=0.02)
    stream = make(engine, max_staleness=1)
    stream.take(0, 100)
    stream.offer(weights(1), 1)
    stream.take(1, 100)
    while len(engine.began) < 3 * SIZE:  # begins under version 1, and runs for 140 ms
        time.sleep(0.001)
    stream.offer(weights(2), 2)
    answers = stream.take(2, 100).scored.trajectories
    versions = answers.sequence(SIZE - 1).weight_version
    assert set(versions) == {1, 2} and np.all(np.diff(versions) >= 0)
    assert set(answers.sequence(0).weight_version) == {1}  # one token, drawn before


def test_of_several_updates_the_engine_gets_the_last(make):
    engine = TimedEngine(step_s=0.05)
    stream = make(engine, max_staleness=100)
    stream.take(0, 100)
    for version in range(1, 20):
        stream.offer(weights(version), version)
    while stream.version != 19:
        time.sleep(0.01)
    drawn = {int(v) for n in range(1, 3) for v in np.unique(stream.take(19, 100).scored.trajectories.weight_version)}
    assert len(drawn) <= 3


def test_too_old_groups_are_generated_again(make):
    """An engine that draws with older weights than it acknowledged, at the first attempt."""
    engine = TimedEngine(lag=1, lags=1)
    stream = make(engine, max_staleness=1, first=3, version=3)
    engine.version = 3
    batch = stream.take(3, 2)
    assert batch.regenerated == 0  # versions 2 are allowed for the batch at hand
    batch = stream.take(4, 1)  # begun under 3, drawn under 2
    assert batch.regenerated == SIZE and set(batch.scored.trajectories.attempt) == {1}
    assert batch.scored.trajectories.sample_id.tolist() == list(range(4 * SIZE, 5 * SIZE))
    assert set(batch.scored.trajectories.weight_version) == {3}


def test_an_engine_that_always_lags_ends_the_run(make):
    stream = make(TimedEngine(lag=5), max_staleness=1)
    with pytest.raises(RuntimeError, match=rf"version 0 and returned tokens of versions before -1 {MAX_ATTEMPTS} times"):
        stream.take(0, 10)


def test_holding_the_engine(make):
    """Evaluation: everything under way is finished, weights are taken at once, and generation goes on afterwards."""
    engine = TimedEngine(step_s=0.005)
    verified = []

    def slowly(number: int, trajectories: Trajectories) -> Scored:
        time.sleep(0.05)
        verified.append(number)
        return score(number, trajectories)

    stream = make(engine, slowly, max_staleness=3)
    with stream.held():  # before it has begun
        stream.offer(weights(7), 7)
        assert engine.version == 7
        stream.offer(weights(0), 0)
    stream.take(0, 100)
    stream.offer(weights(1), 1)
    with stream.held():
        assert engine.version == 1 == stream.version and not engine.health().pending
        begun = len(engine.began)
        assert len(verified) == begun // SIZE
        stream.offer(weights(2), 2)
        assert engine.version == 2 and threading.current_thread() in engine.threads
        time.sleep(0.05)
        assert len(engine.began) == begun
    for number in range(1, 8):
        assert set(stream.take(2, 100).scored.reward) == {number}


def test_generation_and_verification_go_on_while_the_trainer_works(make):
    """Three things of 30 ms a batch, four batches: one after the other they would take 360 ms."""

    def slowly(number: int, trajectories: Trajectories) -> Scored:
        time.sleep(0.03)
        return score(number, trajectories)

    stream = make(TimedEngine(step_s=0.03 / 7), slowly, max_staleness=4)
    stream.take(0, 5)
    started = time.monotonic()
    for number in range(1, 5):
        time.sleep(0.03)
        stream.take(number, 5 - number)
    assert time.monotonic() - started < 0.28


def test_the_end_of_an_engine_is_told(make):
    stream = make(TimedEngine(dies_at=12))
    with pytest.raises(RuntimeError, match=r"the engine died with \d+ of \d+ requests unfinished: out of luck"):
        for number in range(10):
            stream.take(number, 10 - number)
            stream.offer(weights(number + 1), number + 1)
    with pytest.raises(RuntimeError, match="the engine died"), stream.held():
        pass


def test_a_reward_that_fails_is_told_and_ends_nothing_else(make):
    def broken(number: int, trajectories: Trajectories) -> Scored:
        raise UserError("the reward fails on every answer")

    stream = make(TimedEngine(), broken)
    with pytest.raises(UserError, match="fails on every answer"):
        stream.take(0, 10)


def test_an_answer_that_nobody_asked_for(make):
    engine = TimedEngine()
    engine.submit(requests(9))
    with pytest.raises(RuntimeError, match="sample 36, which is not awaited"):
        make(engine).take(0, 10)


@pytest.mark.parametrize("started", [False, True])
def test_closing_drops_what_is_under_way(make, started):
    engine = TimedEngine(step_s=0.01)
    stream = make(engine)
    if started:
        stream.take(0, 100)
    before = threading.active_count()
    stream.close()
    stream.close()
    assert threading.active_count() <= before - started or not started
    assert not [thread for thread in threading.enumerate() if thread.name in ("rollout", "score_0")]
