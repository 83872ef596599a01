"""Rows of a ring join the answers of their samples, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_policy as tiny

from rollout_bridge.engine.messages import answered
from rollout_bridge.engine.records import CapturedRecords, capture_layout
from rollout_bridge.wire import Ring, RingWriter
from tests.rollout_bridge.engine.script_answers import check, collect, requests, sync
from trace_jax.rollout import FinishReason
from trace_jax.rollout.embedded.decode import CaptureSpec

PLAN, NOTHING = tiny.PLANS["bf16"], CaptureSpec()
LAYERS, CHOSEN = tiny.CONFIG.num_layers, tiny.CONFIG.experts_per_token


def rows(request, number: int, fill: int) -> dict[str, np.ndarray]:
    """Routes of the first `number` tokens of a sample."""
    return {
        "sample": np.full(number, request.sample_id, np.uint64),
        "attempt": np.zeros(number, np.uint16),
        "position": np.arange(number, dtype=np.uint32),
        "pass": np.zeros(number, np.uint16),
        "version": np.full(number, 3, np.int32),
        "routes.ids": np.full((number, LAYERS, CHOSEN), fill, np.uint8),
        "routes.layers": np.arange(LAYERS, dtype=np.uint16),
        "routes.part": np.asarray([0, CHOSEN], np.uint32),
    }


@pytest.fixture
def ring(tmp_path: Path):
    size = capture_layout(tiny.CONFIG, PLAN, NOTHING, audit=False).record_bytes(32)
    with Ring.create(slots=2, slot_bytes=size, folders=[tmp_path]) as ring:
        yield ring


def test_answers_get_the_rows_of_their_sample(ring: Ring):
    records = CapturedRecords([ring.path], tiny.CONFIG, PLAN, NOTHING, audit=False)
    assert records.routes and records.kinds == ()
    records.weights({})  # an unquantized rollout has no multipliers
    first, second, third = tiny.requests(3)
    with RingWriter(ring.path) as writer:
        writer.send(rows(first, 4, fill=5), 1.0)  # of a worker that died
        for request in (first, second, third):
            records.expect(request)
        records.forget(third)
        for request, fill in ((first, 1), (second, 2), (third, 3)):
            writer.send(rows(request, request.tokens.size + 1, fill), 1.0)
            records.take()
        answer = {"tokens": [7, 8], "logprobs": [-1.0, -2.0], "versions": [[3, 2]], "reason": "length"}
        for request, fill in ((second, 2), (first, 1)):
            found = records.attach(request, answered(request, answer))
            found.validate()
            assert found.routes is not None and found.guidance is None and found.audit is None
            np.testing.assert_array_equal(found.routes.routes_valid, [True] * (request.tokens.size + 1) + [False])
            assert set(found.routes.routed_experts[:-1].ravel()) == {fill}


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_sample_that_is_submitted_again_gets_no_rows_of_the_run_that_was_aborted(make_engine, ring: Ring, attempt: int):
    """The worker is in the middle of a step of the first run, whose rows it sends afterwards. Each row says which run it is from."""
    records = CapturedRecords([ring.path], tiny.CONFIG, PLAN, NOTHING, audit=False)
    engine = make_engine(records=records, step_s=0.1, capture={"ring": str(ring.path), "layers": LAYERS, "experts": CHOSEN})
    sync(engine)
    (first,) = requests(1, max_new_tokens=12, stop_token_ids=())
    engine.submit([first])
    while records._assembled_by().counts.taken < 4:
        assert engine.poll(0.02).num_sequences == 0
    again = replace(first, attempt=attempt, seed=first.seed + 1)
    engine.abort([first.sample_id])
    engine.submit([again])
    ended, answer = (found := collect(engine, 2)).select([0]), found.select([1])
    assert ended.finish_reason.tolist() == [FinishReason.ABORTED]
    check(answer, [again])
    assert answer.attempt.tolist() == [attempt] and answer.routes is not None and answer.routes.routes_valid[:-1].all()
    assert set(answer.routes.routed_experts[:-1].ravel()) == {1}
