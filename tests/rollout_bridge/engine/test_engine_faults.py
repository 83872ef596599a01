"""Generation ahead of training over a worker in its own process that is killed, hangs, is told to end, or gets damaged memory."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_policy as tiny

from rollout_bridge.engine.messages import answered
from rollout_bridge.engine.records import CapturedRecords, capture_layout
from rollout_bridge.wire import Ring, RingWriter
from tests.rollout_bridge.engine.script_answers import check, expected_ack, kill, layers, process_link, requests, sync
from tests.rollout_bridge.engine.test_records import LAYERS, NOTHING, PLAN, rows
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.stream import Batch, RolloutStream

SIZE, BATCHES = 8, 5


def wanted(number: int):
    """Answers of 3 to 11 tokens, and one of 30."""
    batch = requests(SIZE, first=number * SIZE, stop_token_ids=())
    return [*batch[:-1], replace(batch[-1], max_new_tokens=30)]


def scored(number: int, trajectories: Trajectories) -> Scored:
    return Scored(trajectories, np.ones(SIZE, bool), np.ones(SIZE, np.float32), 0)


@pytest.fixture
def train(make_engine):
    """`train(between, **arguments)`: a run of five batches with an update after each; `between(engine, number)` disturbs it."""
    streams: list[RolloutStream] = []

    def run(between, **arguments) -> list[Batch]:
        engine = make_engine(**arguments)
        sync(engine)
        streams.append(stream := RolloutStream(engine, wanted, scored, first=0, version=0, updates=1, max_staleness=2))
        taken = []
        for number in range(BATCHES):
            between(engine, number)
            taken.append(stream.take(number, BATCHES - number))
            stream.offer(list(layers()), number + 1)
        assert engine.health().pending == 0
        return taken

    yield run
    for stream in streams:
        stream.close()


def assert_complete(taken: list[Batch]) -> None:
    """Every prompt once, in order, with the script's answer, and no token older than allowed."""
    for number, batch in enumerate(taken):
        answers = batch.scored.trajectories
        assert answers.sample_id.tolist() == [request.sample_id for request in wanted(number)]
        assert number - 2 <= answers.weight_version.min() and answers.weight_version.max() <= number
        check(answers.replace(weight_version=np.zeros_like(answers.weight_version)), wanted(number))


def test_kill_9_of_a_worker_while_batches_run_ahead(train, capfd):
    killed: list[int] = []

    def disturb(engine, number: int) -> None:
        if number > 1:  # later ones could come when nothing is left to do
            return
        while (pid := process_link(engine).pid) in killed:  # another one is being started
            time.sleep(0.01)
        time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    assert_complete(train(disturb, step_s=0.005))
    assert capfd.readouterr().err.count("killed by SIGKILL") == 2


def test_a_worker_that_hangs_while_batches_run_ahead(train, capfd):
    assert_complete(train(lambda engine, number: None, hangs_at=9, silence_s=1.0))
    assert "it said nothing for 1 s and was killed" in capfd.readouterr().err


def test_sequences_go_on_under_new_weights(train):
    """The server changes weights between two steps, so the long answers of a batch have several versions, in rising order."""

    def slowly(engine, number: int) -> None:
        time.sleep(0.05)

    taken = train(slowly, step_s=0.02)
    assert_complete(taken)
    every = [batch.scored.trajectories.sequence(SIZE - 1) for batch in taken]
    assert any(len(set(one.weight_version)) > 1 for one in every)
    assert all(np.all(np.diff(one.weight_version) >= 0) for one in every)


def test_sigterm_to_every_process_of_a_job_ends_no_worker(train, capfd):
    """A preempted trainer finishes its step with the worker that it has; kill -9 above is the control."""
    assert_complete(train(lambda engine, number: os.kill(process_link(engine).pid, signal.SIGTERM), step_s=0.005))
    assert "worker died" not in capfd.readouterr().err


def test_a_worker_that_hangs_in_an_update_is_replaced(make_engine, capfd):
    engine = make_engine(hangs_in_update=1, silence_s=1.0)
    sync(engine, 0)
    assert engine.update_weights(layers(size=5000), 1) == expected_ack(1, size=5000)
    assert "worker died" in capfd.readouterr().err
    check(generate(engine, requests(4)), requests(4), version=1)


def test_weights_damaged_in_shared_memory_are_noticed_and_sent_again(make_engine, capfd):
    engine = make_engine(damages_update=1)
    sync(engine, 0)
    sync(engine, 1)
    told = capfd.readouterr().err
    assert "refused new weights: weights of version 1 refused" in told and "is not what was written" in told and "worker died" not in told
    check(generate(engine, requests(4)), requests(4), version=1)
    with pytest.raises(ValueError, match="version 2 refused: model.layers.1.bad.weight"):  # what is wrong stays wrong
        engine.update_weights(layers(("a", "bad")), 2)
    kill(engine)
    check(generate(engine, requests(4)), requests(4), version=1)


def test_rows_damaged_in_shared_memory_are_missing_and_all_others_are_there(tmp_path: Path):
    size = capture_layout(tiny.CONFIG, PLAN, NOTHING, audit=False).record_bytes(32)
    first, second = tiny.requests(2)
    with Ring.create(slots=2, slot_bytes=size, folders=[tmp_path]) as ring:
        records = CapturedRecords([ring.path], tiny.CONFIG, PLAN, NOTHING, audit=False)
        records.weights({})
        for request in (first, second):
            records.expect(request)
        with RingWriter(ring.path) as writer:
            for request, fill in ((first, 1), (second, 2)):
                sent = rows(request, request.tokens.size + 1, fill)
                writer.send(sent, 1.0)
            content = bytearray(ring.path.read_bytes())
            place = content.index(rows(first, first.tokens.size + 1, 1)["routes.ids"].tobytes())
            with open(ring.path, "r+b") as file:
                file.seek(place + 3)
                file.write(bytes([content[place + 3] ^ 0x10]))
            records.take()
            answer = {"tokens": [7, 8], "logprobs": [-1.0, -2.0], "versions": [[3, 2]], "reason": "length"}
            damaged, whole = (records.attach(request, answered(request, answer)) for request in (first, second))
    assert damaged.routes is not None and not damaged.routes.routes_valid.any()
    assert whole.routes is not None and whole.routes.routes_valid[:-1].all() and whole.routes.routed_experts[:-1].max() == 2
    assert LAYERS == whole.routes.routed_experts.shape[1]
