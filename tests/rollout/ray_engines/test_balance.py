"""Dividing requests among engines, and what is refused before Ray is started."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.ray_engines.conftest import ray_setup
from trace_jax.errors import UserError
from trace_jax.rollout import Request
from trace_jax.rollout.ray_engines.balance import shares, tokens_of

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=40)


def requests_of(lengths: list[tuple[int, int]]) -> list[Request]:
    return [Request(i, i, 0, np.zeros(prompt, np.int32), new) for i, (prompt, new) in enumerate(lengths)]


@given(LENGTHS, st.lists(st.integers(0, 500), min_size=1, max_size=5))
def test_every_request_goes_to_one_engine_and_none_is_overloaded(lengths: list[tuple[int, int]], loads: list[int]):
    """No engine that gets something ends further above the least loaded one than one request is long."""
    requests = requests_of(lengths)
    divided = shares(requests, loads)
    assert len(divided) == len(loads)
    assert sorted(request.sample_id for share in divided for request in share) == list(range(len(requests)))
    assert all([request.sample_id for request in share] == sorted(request.sample_id for request in share) for share in divided)
    ends = [load + sum(map(tokens_of, share)) for load, share in zip(loads, divided, strict=True)]
    for share, end in zip(divided, ends, strict=True):
        assert not share or end - min(ends) <= max(map(tokens_of, share))


def test_lengths_count_and_not_numbers():
    """Halves by number, which a division by turns gives, would leave one engine with 330 tokens and the other with 150."""
    lengths = [(100, 10), (40, 10), (100, 10), (40, 10), (100, 10), (40, 10)]
    divided = shares(requests_of(lengths), [0, 0])
    assert sorted(sum(map(tokens_of, share)) for share in divided) == [220, 260]
    assert [len(share) for share in shares(requests_of([(5, 5)] * 16), [0, 0])] == [8, 8]


def test_several_engines_need_ray():
    wanted = "^rollout.engines is 2, but rollout.launcher process runs one engine; write launcher: ray, or engines: 1$"
    with pytest.raises(UserError, match=wanted):
        ray_setup("rollout.launcher=process")


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "trace_jax.rollout.ray_engines.pool", raising=False)
    wanted = r"^rollout.launcher ray needs Ray; run: pip install 'trace-jax\[ray\]', or write launcher: process$"
    with pytest.raises(UserError, match=wanted):
        ray_setup().engine()
