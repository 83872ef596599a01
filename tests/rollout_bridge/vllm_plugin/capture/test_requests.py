"""Rows of forwards against a plain count of what was computed before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
from rollout_bridge.vllm_plugin.capture.requests import RequestRows, SampleKey, sample_key  # noqa: E402

KNOWN = {"a-1": {"trace_jax": [7, 1]}, "b-2": {"trace_jax": [str(2**64 - 1), 0, True]}, "probe-3": None}


@given(
    schedule=st.lists(
        st.lists(st.tuples(st.sampled_from(sorted(KNOWN)), st.integers(0, 5), st.booleans()), max_size=3, unique_by=lambda step: step[0]),
        max_size=12,
    )
)
def test_rows_of_any_schedule(schedule):
    """Each step computes some tokens of some requests, in any order; a flag lets a request start again, as preemption does."""
    tracker, done, before = RequestRows(), dict.fromkeys(KNOWN, 0), Counter()
    for step in schedule:
        starts, sizes = [], []
        for name, size, restarts in step:
            done[name] = 0 if restarts else done[name]
            starts.append(done[name])
            sizes.append(size)
            done[name] += size
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        rows = tracker.forward([name for name, *_ in step], np.asarray(starts, np.int32), bounds, KNOWN)
        expected = [
            (int(bounds[place]) + offset, name, starts[place] + offset)
            for place, (name, size, _) in enumerate(step)
            for offset in range(size)
            if name != "probe-3"
        ]
        keys = {name: sample_key(name, KNOWN[name]) for name in KNOWN}
        assert rows.count == bounds[-1] and rows.index.tolist() == [index for index, *_ in expected]
        assert rows.position.tolist() == [position for *_, position in expected]
        assert rows.sample.tolist() == [getattr(keys[name], "sample") for _, name, _ in expected]  # noqa: B009
        assert rows.audited.tolist() == [name == "b-2" for _, name, _ in expected]
        assert rows.passes.tolist() == [before[name, position] for _, name, position in expected]
        before.update((name, position) for _, name, position in expected)


def test_a_request_that_is_gone_is_forgotten():
    tracker = RequestRows()
    start, bounds = np.zeros(1, np.int32), np.asarray([0, 4], np.int32)
    assert tracker.forward(["a-1"], start, bounds, KNOWN).passes.tolist() == [0] * 4
    assert tracker.forward(["a-1"], start, bounds, KNOWN).passes.tolist() == [1] * 4
    tracker.forward([], np.zeros(0, np.int32), np.zeros(1, np.int32), {})
    assert tracker.forward(["a-1"], start, bounds, KNOWN).passes.tolist() == [0] * 4


def test_samples_of_requests():
    assert sample_key("x", {"trace_jax": [2**63 - 1, 3]}) == SampleKey(2**63 - 1, 3, False)
    assert sample_key("x", {"trace_jax": [str(2**64 - 1), 0, 1]}) == SampleKey(2**64 - 1, 0, True)
    assert sample_key("1_x-ab", {"trace_jax": [[4, 5], 0]}) == SampleKey(5, 0, False)
    assert sample_key("1_x-ab", {"trace_jax": [[4], 0]}) == SampleKey(4, 0, False)  # a request's own id, not a child's
    assert sample_key("x", {"other": 1}) is None and sample_key("x", None) is None
    for entry in (5, [5], [-1, 0], [2**64, 0], [1, 1 << 16], ["x", 0], [[4, 5], 0]):
        with pytest.raises(ValueError, match=r"request 7-ab: extra_args\['trace_jax'\] is "):
            sample_key("7-ab", {"trace_jax": entry})
