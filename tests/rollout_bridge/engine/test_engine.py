"""The engine over a scripted worker: everything comes once, and nothing is lost when the worker dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.rollout_bridge.engine.script_answers import check, collect, expected_ack, kill, layers, process_link, requests, sync
from tests.rollout_bridge.engine.scripted import CONTEXT, REFUSED, VOCABULARY
from trace_jax.errors import UserError
from trace_jax.rollout import FinishReason, Health, LayerUpdate, Trajectories, generate


def test_answers_of_several_batches(make_engine):
    engine = make_engine()
    assert engine.poll().num_sequences == 0
    sync(engine)
    wanted = requests(12)
    first = generate(engine, wanted)
    assert first.sample_id.tolist() == list(range(12))
    check(first, wanted)
    large = [replace(request, sample_id=2**63 + request.sample_id) for request in requests(4, temperature=0.5)]
    check(generate(engine, [*large, *wanted[:2]]), [*large, *wanted[:2]])  # the same samples again
    assert engine.health() == Health(True, "ready", 0, False, 0)


def test_in_the_trainer_s_process(make_engine):
    engine = make_engine(in_process=True)
    sync(engine, 3)
    check(generate(engine, requests(6)), requests(6), version=3)
    engine.pause()
    engine.submit(requests(3))
    assert engine.poll(0.05).num_sequences == 0
    engine.resume()
    check(collect(engine, 3), requests(3), version=3)
    with pytest.raises(ValueError, match="version 4 refused: model.layers.1.bad.weight"):
        engine.update_weights(layers(("a", "bad")), 4)
    assert engine.health().version == 3


def test_an_engine_without_weights(make_engine):
    engine = make_engine()
    engine.submit(requests(3))
    with pytest.raises(RuntimeError, match="call update_weights first"):
        engine.poll(1.0)
    engine.abort([1])
    assert engine.poll().finish_reason.tolist() == [FinishReason.ABORTED]
    sync(engine)
    check(collect(engine, 2), [request for request in requests(3) if request.sample_id != 1])


def test_what_cannot_be_served_is_refused_before_anything_is_queued(make_engine):
    engine = make_engine()
    sync(engine)
    good = requests(1)[0]
    wrong = {
        f"context of {CONTEXT}": {"max_new_tokens": CONTEXT},
        f"token ids outside 0..{VOCABULARY - 1}": {"tokens": np.asarray([VOCABULARY], np.int32)},
    }
    for message, change in wrong.items():
        with pytest.raises(UserError, match=message):
            engine.submit([good, replace(good, sample_id=9, **change)])
    with pytest.raises(ValueError, match="sample 0 is pending already"):
        engine.submit([good, good])
    assert engine.health().pending == 0
    engine.submit([replace(good, tokens=np.asarray([REFUSED], np.int32)), requests(2)[1]])
    with pytest.raises(UserError, match="vLLM refuses the prompt 100: this prompt is not taken"):
        while True:
            engine.poll(5.0)
    check(collect(engine, 1), requests(2)[1:])


def test_aborted_requests_come_back_once(make_engine):
    engine = make_engine(step_s=0.01)
    sync(engine, 2)
    engine.submit(requests(6, max_new_tokens=20))
    engine.abort([1, 4, 99])
    engine.submit(requests(1, first=4, max_new_tokens=3))  # again, while the worker may still work on the first one
    result = collect(engine, 7)
    aborted = result.select(np.flatnonzero(result.finish_reason == FinishReason.ABORTED))
    assert aborted.sample_id.tolist() == [1, 4] and not aborted.sampled.any() and set(aborted.weight_version) == {2}
    rest = result.select(np.flatnonzero(result.finish_reason != FinishReason.ABORTED))
    wanted = [r for r in requests(6, max_new_tokens=20) if r.sample_id not in (1, 4)]
    check(rest, [*wanted, *requests(1, first=4, max_new_tokens=3)], version=2)
    assert engine.poll(0.1).num_sequences == 0


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_pause_modes(make_engine, mode):
    engine = make_engine(step_s=0.005)
    sync(engine)
    wanted = requests(5, max_new_tokens=10, stop_token_ids=())
    engine.submit(wanted)
    while process_link(engine) and engine._worker.call("health")["steps"] < 3:
        pass
    engine.pause(mode)
    late = requests(2, first=20, max_new_tokens=4)
    engine.submit(late)
    time.sleep(0.1)
    held = engine.poll(0.2)
    assert engine.health().paused
    sync(engine, 1)
    engine.resume()
    rest = collect(engine, 7 - held.num_sequences)
    if mode == "wait":
        check(held, wanted)
        check(rest, late, version=1)
    elif mode == "abort":
        assert held.finish_reason.tolist() == [FinishReason.ABORTED] * 5
        check(rest, late, version=1)
    else:
        assert held.num_sequences == 0
        both = rest.select(np.flatnonzero(rest.sample_id < 20))
        assert set(both.weight_version) == {0, 1} and np.all(np.diff(both.sequence(0).weight_version) >= 0)
        check(rest.replace(weight_version=np.zeros_like(rest.weight_version)), [*wanted, *late])


def test_kill_9_in_the_middle_loses_and_doubles_nothing(make_engine, capfd):
    engine = make_engine(step_s=0.03)
    sync(engine, 5)
    wanted = requests(30)
    engine.submit(wanted)
    parts = [collect(engine, 4)]
    time.sleep(0.1)  # more have finished, and lie in the socket
    kill(engine)
    parts.append(engine.poll(5.0))
    engine.submit(requests(3, first=50))
    kill(engine)
    while sum(part.num_sequences for part in parts) < 33:
        parts.append(engine.poll(5.0))
    check(Trajectories.concat(parts), [*wanted, *requests(3, first=50)], version=5)
    assert engine.poll(0.05).num_sequences == 0 and engine.health().pending == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "worker died" in line]
    assert len(said) == 2 and "killed by SIGKILL" in said[0] and "starting another (1 of 3)" in said[0]
    anew = [int(line.split(", ")[-1].split()[0]) for line in said]
    assert 0 < anew[0] < 26  # neither everything nor what had finished


@pytest.mark.parametrize("when", ["dies_at", "fails_at"])
def test_a_step_that_kills_the_worker(make_engine, when, capfd):
    engine = make_engine(**{when: 4})
    sync(engine)
    check(generate(engine, requests(12)), requests(12))
    assert {"dies_at": "SIGKILL", "fails_at": "out of memory (exit code 1"}[when] in capfd.readouterr().err


def test_a_worker_that_hangs_is_replaced(make_engine, capfd):
    engine = make_engine(hangs_at=3, silence_s=1.0)
    sync(engine)
    check(generate(engine, requests(8)), requests(8))
    assert "it said nothing for 1 s and was killed" in capfd.readouterr().err


def test_a_paused_engine_comes_back_paused(make_engine):
    engine = make_engine()
    sync(engine)
    engine.pause("keep")
    engine.submit(requests(3))
    kill(engine)
    assert engine.poll(0.2).num_sequences == 0 and engine.health().paused
    while engine._worker.call("health")["waiting"] < 3:
        engine.poll(0.1)
    assert engine.poll(0.2).num_sequences == 0
    engine.resume()
    check(collect(engine, 3), requests(3))


def test_restarts_are_bounded_and_what_finished_is_returned(make_engine):
    engine = make_engine(max_restarts=1, step_s=0.02)
    sync(engine)
    engine.submit([*requests(2, max_new_tokens=3), *requests(18, first=2, max_new_tokens=50, stop_token_ids=())])
    found = [collect(engine, 1)]
    kill(engine)
    engine.submit(requests(1, first=20, max_new_tokens=3))
    found.append(collect(engine, 1))
    kill(engine)
    while engine.health().alive:
        found.append(engine.poll(1.0))
    ids = np.concatenate([part.sample_id for part in found]).tolist()
    assert 2 <= len(ids) == len(set(ids)) < 20
    assert engine.poll(1.0).num_sequences == 0
    detail = engine.health().detail
    assert "killed by SIGKILL" in detail and "1 of rollout.vllm.max_restarts=1 are used up" in detail and "\n" not in detail
    for act in (
        lambda: engine.submit(requests(1, first=90)),
        engine.resume,
        engine.capabilities,
        lambda: engine.update_weights(layers(), 1),
    ):
        with pytest.raises(RuntimeError, match="are used up"):
            act()


def test_generate_says_why_the_engine_died(make_engine):
    engine = make_engine(max_restarts=0, dies_at=2)
    sync(engine)
    with pytest.raises(RuntimeError, match="the engine died with 8 of 8 requests unfinished: the rollout worker died: .*SIGKILL"):
        generate(engine, requests(8))


def test_a_worker_that_dies_in_an_update_gets_all_of_it_again(make_engine):
    engine = make_engine(dies_in_update=1, step_s=0.005)
    sync(engine, 0)
    engine.submit(requests(10, max_new_tokens=30))
    seen = []

    def counted() -> Iterator[LayerUpdate]:
        for update in layers(size=5000):
            seen.append(update.layer_id)
            yield update

    assert engine.update_weights(counted(), 1) == expected_ack(1, size=5000)
    assert seen == [0, 1]  # the trainer makes each layer once
    result = collect(engine, 10)
    assert engine.health().version == 1 and engine.health().pending == 0
    check(result, requests(10, max_new_tokens=30), version=1)


def test_a_refused_update_leaves_the_old_weights(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="version 0 refused: model.layers.1.bad.weight"):
        engine.update_weights(layers(("a", "bad")), 0)
    assert engine.health().version == -1
    sync(engine, 1)
    with pytest.raises(ValueError, match="version 2 refused"):
        engine.update_weights(layers(("a", "bad")), 2)
    kill(engine)
    check(generate(engine, requests(3)), requests(3), version=1)


def test_an_update_that_the_trainer_cannot_make(make_engine):
    engine = make_engine()
    sync(engine, 1)

    def broken() -> Iterator[LayerUpdate]:
        yield from layers()
        raise FloatingPointError("a weight is not finite")

    started = time.monotonic()
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.update_weights(broken(), 2)
    assert time.monotonic() - started < 10
    check(generate(engine, requests(3)), requests(3), version=1)
    sync(engine, 3)


def test_the_worker_dies_while_nobody_waits(make_engine):
    engine = make_engine()
    sync(engine)
    kill(engine)
    assert engine.capabilities().backend == "a script with channels None" and engine.capabilities().residual_fraction == 0
    kill(engine)
    sync(engine, 1)
    kill(engine)
    check(generate(engine, requests(3)), requests(3), version=1)


def test_every_worker_compensates_the_same_channels(make_engine):
    channels = {"expert_input": [[0, 2], [1, 3]], "down_input": [[0], [1]]}
    engine = make_engine(channels=channels)
    sync(engine)
    told = engine.capabilities()
    assert told.backend == f"a script with channels {channels}" and told.residual_fraction == 0.5
    sync(engine, 1)
    kill(engine)
    check(generate(engine, requests(3)), requests(3), version=1)
    assert engine.capabilities() == told


def test_a_closed_engine(make_engine):
    engine = make_engine()
    sync(engine)
    engine.submit(requests(3))
    engine.close()
    engine.close()
    assert not engine.health().alive and engine.health().pending == 0 and engine.poll(1.0).num_sequences == 0
