"""Generation ahead of training: batches in order, never too old, each answer once; what goes wrong reaches the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
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
    """The first answer of batch n takes n + 1 polls, the last n + 7."""
    return [
        Request(sample, sample // 2, sample // 2 * 2, np.zeros(2, np.int32), 1 + number + 2 * (sample % SIZE))
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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 60 seconds"
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("updates", "every", "max_staleness"), [(1, 1, 1), (1, 1, 3), (3, 1, 4), (2, 3, 6), (1, 4, 4), (3, 2, 4), (2, 3, 4)]
)
@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_no_token_is_older_than_allowed_and_every_answer_comes_once(make, updates, every, max_staleness, step_s):
    """A trainer of uneven speed that refuses some updates."""
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


def test_generation_waits_for_the_trainer(make):
    """How far it runs ahead is what the staleness allows: batches 0 to 2 under version 0, one more with every update."""
    engine = TimedEngine()
    stream = make(engine, max_staleness=2)
    assert not engine.threads  # nothing happens before the first batch is asked for
    for number in range(5):
        answers = stream.take(number, 100).scored.trajectories
        assert set(answers.weight_version) == {max(0, number - 2)}  # as old as allowed, which is the control of the test above
        wait_until(lambda n=number: stream.waiting == 2 and len(engine.began) == (n + 3) * SIZE)
        time.sleep(0.02)
        assert len(engine.began) == (number + 3) * SIZE
        stream.offer(weights(number + 1), number + 1)
        wait_until(lambda n=number: stream.version == n + 1 and len(engine.began) == (n + 4) * SIZE)
    assert engine.threads and threading.main_thread() not in engine.threads


def test_with_no_room_for_staleness_they_alternate(make):
    engine = TimedEngine()
    stream = make(engine, updates=2, max_staleness=1)
    for number in range(3):
        batch = stream.take(2 * number, 100).scored.trajectories
        time.sleep(0.02)
        assert set(batch.weight_version) == {2 * number} and len(engine.began) == (number + 1) * SIZE
        for version in (2 * number + 1, 2 * number + 2):
            stream.offer(weights(version), version)


def test_sequences_go_on_under_new_weights_and_say_so(make):
    """Batch 1 begins at the second poll; new weights are offered in the eighth, and the engine takes them after it."""
    engine = TimedEngine(stepwise=True)
    stream = make(engine, max_staleness=1)
    engine.permits.release(7)  # as many as batch 0 takes
    stream.take(0, 100)
    wait_until(lambda: engine.blocked)
    stream.offer(weights(1), 1)
    engine.permits.release(100)
    answers = stream.take(1, 100).scored.trajectories
    drawn = [one.weight_version[one.sampled].tolist() for one in (answers.sequence(index) for index in range(SIZE))]
    assert drawn == [[0] * 2, [0] * 4, [0] * 6, [0] * 7 + [1]]
    assert set(stream.take(1, 99).scored.trajectories.weight_version) == {1}


def test_of_several_updates_the_engine_gets_the_last(make):
    engine = TimedEngine(stepwise=True)
    stream = make(engine, max_staleness=100)
    engine.permits.release(7)
    stream.take(0, 100)
    wait_until(lambda: engine.blocked)
    for version in range(1, 20):
        stream.offer(weights(version), version)
    engine.permits.release(1000)
    drawn = {int(v) for n in range(1, 20) for v in np.unique(stream.take(19, 100 - n).scored.trajectories.weight_version)}
    assert drawn == {0, 19}


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
    """The trainer, busy with batch 0, waits for the verdicts of batch 1, whose verifier waits for the begin of batch 2."""
    engine = TimedEngine()
    verified = threading.Event()

    def waiting(number: int, trajectories: Trajectories) -> Scored:
        if number == 1:
            wait_until(lambda: len(engine.began) >= 3 * SIZE)
            verified.set()
        return score(number, trajectories)

    stream = make(engine, waiting, max_staleness=2)
    stream.take(0, 5)
    assert verified.wait(60)
    assert set(stream.take(0, 4).scored.reward) == {1}


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
    engine.submit([Request(99, 0, 0, np.zeros(2, np.int32), 1)])
    with pytest.raises(RuntimeError, match="sample 99, which is not awaited"):
        make(engine).take(0, 10)


@pytest.mark.parametrize("started", [False, True])
def test_closing_drops_what_is_under_way(make, started):
    engine = TimedEngine(step_s=0.01)
    stream = make(engine)
    if started:
        stream.take(0, 100)
        assert [thread for thread in threading.enumerate() if thread.name == "rollout"]
    stream.close()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout" or thread.name.startswith("score_")]
