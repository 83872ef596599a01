"""The assembler against what was captured: whatever the order of the records, the rows come back bit for bit or are marked missing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.assembler import Assembled, Assembler, Layout
from rollout_bridge.wire import record_bytes
from tests import tiny_policy
from tests.rollout_bridge.assembler.captured import (
    HEAD,
    assert_same,
    fed_rows,
    keys,
    layout,
    record_of,
    recorded,
    trajectories,
    two_ranks,
)
from tests.tiny_policy import CONFIG, PLANS
from trace_jax.guidance import GuidanceRecord
from trace_jax.rollout import Routes
from trace_jax.rollout.embedded.decode import CaptureSpec

ROOM = 1 << 20
"""Bytes for all rows."""


def opened(made: Assembler) -> Assembler:
    for sample, attempt in zip(trajectories().sample_id.tolist(), trajectories().attempt.tolist(), strict=True):
        made.expect(sample, attempt)
    return made


def finished(made: Assembler) -> list[Assembled]:
    ended = zip(trajectories().sample_id.tolist(), trajectories().attempt.tolist(), trajectories().lengths().tolist(), strict=True)
    return [made.finish(sample, attempt, length) for sample, attempt, length in ended]


def joined(parts: list[Assembled]) -> tuple[GuidanceRecord, Routes]:
    """One record of all sequences, checked against the contract."""
    sizes = [part.version.size for part in parts]
    guidance, routes = (
        GuidanceRecord.concat([part.guidance for part in parts], sizes),
        Routes.concat([part.routes for part in parts], sizes),
    )
    assert guidance is not None and routes is not None
    trajectories().replace(guidance=guidance, routes=routes).validate()
    return guidance, routes


def expected(valid: np.ndarray) -> GuidanceRecord:
    """The record with only these rows."""
    record = recorded(trajectories())
    full, blank = record.take(np.arange(valid.size)), record.blank(valid.size)
    sites = {}
    for name, site in full.sites.items():
        empty = blank.sites[name]
        assert site.data is not None and empty.data is not None
        site.data[~valid], site.scales[~valid] = empty.data[~valid], empty.scales[~valid]
        sites[name] = site
    return dataclasses.replace(full, sites=sites, valid=valid)


@given(data=st.data())
def test_two_workers_in_any_order_with_gaps_and_duplicates(data):
    """Every row appears in one forward of both workers; a row is valid if and only if both records came."""
    seed = data.draw(st.integers(0, 999), "cuts, mixture and order")
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, fed_rows().size), size=data.draw(st.integers(0, 12)), replace=False))
    forwards = np.split(rng.permutation(fed_rows()) if data.draw(st.booleans(), "mixed") else fed_rows(), cuts)
    sent = [record for rows in forwards for record in two_ranks(trajectories(), rows, version=7)]
    lost = data.draw(st.sets(st.integers(0, len(sent) - 1), max_size=3), "lost")
    copies = [index for index in range(len(sent)) if index not in lost]
    copies += data.draw(st.lists(st.sampled_from(copies), max_size=3), "sent again") if copies else []
    made = opened(Assembler(layout(), ROOM))
    for index in rng.permutation(copies):
        made.take(sent[index])
    parts = finished(made)
    guidance, routes = joined(parts)
    valid, routed = np.zeros(trajectories().num_tokens, bool), np.zeros(trajectories().num_tokens, bool)
    for number, rows in enumerate(forwards):
        valid[rows] = not {2 * number, 2 * number + 1} & lost
        routed[rows] = 2 * number not in lost
    assert_same(guidance, expected(valid))
    source = trajectories().routes
    assert source is not None
    np.testing.assert_array_equal(routes.routes_valid, routed)
    np.testing.assert_array_equal(routes.routed_experts[routed], source.routed_experts[routed])
    assert made.counts.missing == sum(part.missing for part in parts) == fed_rows().size - valid.sum()
    assert made.counts.recomputed == made.counts.unexpected == made.counts.overflow == 0
    if not lost:
        assert all((part.version == 7).all() for part in parts)


def other_bytes() -> GuidanceRecord:
    """A record that differs from the real one in every byte."""
    record = recorded(trajectories())
    changed = {}
    for name, site in record.sites.items():
        assert site.data is not None
        changed[name] = dataclasses.replace(site, data=site.data ^ 0x11, scales=site.scales ^ 1)
    return dataclasses.replace(record, sites=changed)


@pytest.mark.parametrize("order", (1, -1), ids=("in order", "backwards"))
def test_a_token_computed_again_keeps_its_first_input_and_its_last_keys(order: int):
    """One sequence is preempted and computed again from its start, under newer weights."""
    again = np.arange(trajectories().offsets[2], trajectories().offsets[2] + 5)
    second = two_ranks(trajectories(), again, record=other_bytes(), passes=1, version=4)
    sent = [*two_ranks(trajectories(), fed_rows(), version=3), *second]
    made = opened(Assembler(layout(), ROOM))
    for record in sent[::order]:
        made.take(record)
    parts = finished(made)
    guidance, _ = joined(parts)
    assert guidance.recomputed is not None
    np.testing.assert_array_equal(np.flatnonzero(guidance.recomputed), again)
    np.testing.assert_array_equal(guidance.valid, recorded(trajectories()).valid)
    assert parts[2].recomputed == 5 and made.counts.recomputed == 5
    assert (guidance.version == 3).all() and guidance.sites["expert_input"].version is None
    for name, source in (("expert_input", recorded(trajectories())), ("k", other_bytes()), ("v", other_bytes())):
        mine, theirs = guidance.sites[name], source.sites[name]
        assert mine.data is not None and theirs.data is not None
        np.testing.assert_array_equal(mine.data[again], theirs.data[again])
        np.testing.assert_array_equal(mine.scales[again], theirs.scales[again])
    version = guidance.sites["k"].version
    assert version is not None and (version[again] == 4).all() and (np.delete(version, again) == 3).all()


def test_parts_of_different_computations_are_never_mixed():
    """The second worker's record of the second computation is lost, or all of the first computation is."""
    again, second = fed_rows()[:4], two_ranks(trajectories(), fed_rows()[:4], record=other_bytes(), passes=1)
    made = opened(Assembler(layout(), ROOM))
    for record in (*two_ranks(trajectories(), fed_rows()), second[0]):
        made.take(record)
    guidance, routes = joined(finished(made))
    assert not guidance.valid[again].any() and routes.routes_valid[again].all() and guidance.valid.sum() == fed_rows().size - 4
    made = opened(Assembler(layout(), ROOM))
    for record in (*two_ranks(trajectories(), fed_rows()[4:]), *second):
        made.take(record)
    guidance, routes = joined(finished(made))
    assert not guidance.valid[again].any() and not routes.routes_valid[again].any()


@pytest.mark.parametrize("kind", ("mantissa", "scales"))
def test_compact_records_of_some_layers(kind):
    compact = recorded(trajectories()).to_compact(kind, (1, 2))
    made = opened(Assembler(layout(kind, (1, 2)), ROOM))
    for record in two_ranks(trajectories(), fed_rows(), record=compact):
        made.take(record)
    guidance, _ = joined(finished(made))
    assert_same(guidance, compact)


def test_an_audit_has_its_own_layers_and_rows():
    """The third and fifth sequences are audited; the fourth, which shares a forward with them, is not."""
    audited = fed_rows()[np.isin(keys(trajectories(), fed_rows())[0], (2, 4))]
    compact = recorded(trajectories()).to_compact("mantissa", (2,))
    made = opened(Assembler(layout("mantissa", (2,), audit=True), ROOM))
    record = record_of(trajectories(), fed_rows(), record=compact)
    full = record_of(trajectories(), audited, prefix="audit.", routes=False)
    made.take(record | {name: array for name, array in full.items() if "." in name} | {"audit.rows": np.searchsorted(fed_rows(), audited)})
    parts = finished(made)
    assert [part.audit is not None for part in parts] == [False, False, True, False, True, False]
    for index in (2, 4):
        audit = parts[index].audit
        assert audit is not None
        assert_same(audit, recorded(trajectories().sequence(index)))
    assert_same(joined(parts)[0], compact)


def test_memory_is_bounded_and_slots_are_used_again():
    def budget(tokens: int) -> int:
        return tokens * (1 + sum(16 + 3 * size for size in (32 + 4, 2 * (16 + 2), 2 * (16 + 2), 2)))

    made = Assembler(layout(), budget(fed_rows().size))
    for _ in range(3):
        opened(made).take(record_of(trajectories(), fed_rows()))
        assert joined(finished(made))[0].valid.sum() == fed_rows().size
    assert made.counts.overflow == 0
    made = opened(Assembler(layout(), budget(fed_rows().size - 20)))
    made.take(record_of(trajectories(), fed_rows()))
    guidance, _ = joined(finished(made))
    assert made.counts.overflow == made.counts.missing == 20
    assert_same(guidance, expected(guidance.valid))
    with pytest.raises(ValueError, match="less than one token takes"):
        Assembler(layout(), 100)


def test_rows_of_samples_that_nobody_awaits_are_dropped():
    made = opened(Assembler(layout(), ROOM))
    made.forget(int(trajectories().sample_id[1]))
    made.forget(12345)
    made.take(record_of(trajectories(), fed_rows()))
    of_second = int(np.count_nonzero(keys(trajectories(), fed_rows())[0] == 1))
    assert made.counts.unexpected == of_second and made.counts.taken == fed_rows().size - of_second
    # It is submitted again, and nothing that came before counts.
    made.expect(int(trajectories().sample_id[0]), 0)
    made.expect(int(trajectories().sample_id[1]), 0)
    parts = finished(made)
    assert [part.missing == part.version.size - 1 for part in parts] == [True, True, False, False, False, False]
    with pytest.raises(ValueError, match="not expected; call expect"):
        made.finish(int(trajectories().sample_id[0]), 0, 3)
    made.take(record_of(trajectories(), fed_rows()))
    assert made.counts.unexpected == of_second + fed_rows().size


def test_the_plan_and_the_size_of_a_slot():
    made = layout("mantissa", (1, 2), audit=True)
    assert made.plan() == {"kind": "mantissa", "layers": [1, 2], "sites": ["expert_input", "k", "v"], "routes": True, "audit": True}
    compact = recorded(trajectories()).to_compact("mantissa", (1, 2))
    audit = {name: array for name, array in record_of(trajectories(), fed_rows(), prefix="audit.").items() if "." in name}
    largest = record_of(trajectories(), fed_rows(), record=compact) | audit | {"audit.rows": np.arange(fed_rows().size, dtype=np.uint32)}
    assert record_bytes(largest) <= made.record_bytes(fed_rows().size) < record_bytes(largest) + 8 * 64
    unguided = layout("none")
    assert unguided.plan() == {"kind": "none", "layers": [], "sites": [], "routes": True, "audit": False}
    made = opened(Assembler(unguided, ROOM))
    made.take(record_of(trajectories(), fed_rows(), parts={}))
    parts = finished(made)
    assert all(part.guidance is None and part.routes is not None and part.missing == 0 for part in parts)


WRONG = {
    "k.part: 0..33 .* divides a unit of 32": {"k.part": np.asarray([0, HEAD + 1], np.uint32)},
    "lies outside": {"k.part": np.asarray([0, 3 * HEAD], np.uint32)},
    "k.scales: .* expected": {"k.part": np.asarray([0, HEAD], np.uint32)},
    "v.multiplier: the engine rounds with .1.0": {"v.multiplier": np.ones(3, np.float32)},
    "v.multiplier: the engine rounds with None": {"v.multiplier": None},
    "k.layers: .* differ in the plan": {"k.layers": np.asarray([0, 1, 5], np.uint16)},
    "expert_input: the record lacks one of": {"expert_input.scales": None},
    "k.latent: the layout has no such array": {"k.latent": np.zeros(3, np.uint8)},
    "pass: expected uint16": {"pass": np.zeros(3, np.uint16)},
    "position: a record holds a token twice": {"position": 5},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_the_layout_is_refused(message: str):
    record = record_of(trajectories(), fed_rows())
    for name, value in WRONG[message].items():
        if value is None:
            del record[name]
        else:
            record[name] = np.full_like(record[name], value) if isinstance(value, int) else value
    with pytest.raises(ValueError, match=message):
        opened(Assembler(layout(), ROOM)).take(record)


def test_multipliers_of_the_tokens_own_are_refused():
    spec = CaptureSpec("codes", ("k",), (0,))
    with pytest.raises(ValueError, match="static multipliers only"):
        Layout.of(CONFIG, PLANS["per_token"], spec, tiny_policy.multipliers(), audit=False)
