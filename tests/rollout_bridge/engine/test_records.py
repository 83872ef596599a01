"""Rows of a ring join the answers of their samples, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_policy as tiny

from rollout_bridge.engine.messages import answered
from rollout_bridge.engine.records import CapturedRecords, capture_layout
from rollout_bridge.wire import Ring, RingWriter
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
    records = CapturedRecords(ring.path, tiny.CONFIG, PLAN, NOTHING, audit=False)
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
