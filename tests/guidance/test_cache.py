"""GuidanceCache in memory and in a folder: what goes in comes out, or is missing and counted."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import assert_same, random_trajectories

from trace_jax.errors import UserError
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.guidance.cache_index import data_files
from trace_jax.rollout import Trajectories

PLENTY = 1 << 24


def open_cache(folder, budget=PLENTY):
    """A cache in a folder, or in memory for None."""
    return GuidanceCache(budget) if folder is None else GuidanceCache.open(folder, budget)


def batch_size(batch):
    cache = GuidanceCache(PLENTY)
    cache.put(batch)
    return cache.stats().bytes


@pytest.fixture(params=["memory", "folder"])
def folder(request, tmp_path):
    return tmp_path / "cache" if request.param == "folder" else None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=3), st.booleans(), st.data())
def test_round_trip_in_any_order(tmp_path_factory, parts, on_disk, data):
    cache = open_cache(tmp_path_factory.mktemp("cache") if on_disk else None)
    batches = [random_trajectories(lengths, seed, first_id=10 * seed, per_token=True) for seed, lengths in enumerate(parts)]
    for batch in batches:
        cache.put(batch)
    everything = Trajectories.concat(batches)
    place = {int(sample): index for index, sample in enumerate(everything.sample_id)}
    wanted = data.draw(st.lists(st.sampled_from(sorted(place)), unique=True, min_size=1))
    found = cache.get([*wanted, 999])
    assert_same(found, everything.select([place[sample] for sample in wanted]))
    assert (cache.stats().hits, cache.stats().missing) == (len(wanted), 1)
    lengths = [int(everything.lengths()[place[sample]]) for sample in wanted]
    served = cache.slices(wanted, lengths, layers=[3])
    assert_same(served, everything.select([place[sample] for sample in wanted]).guidance.take_layers([3]))


def test_slices_mark_missing_samples_and_serve_layers(folder):
    cache = open_cache(folder)
    assert cache.slices([1], [4]) is None
    batch = random_trajectories([3, 2], first_id=5)
    cache.put(batch)
    served = cache.slices([6, 77, 5], [2, 4, 3], layers=[2])
    served.validate(9)
    np.testing.assert_array_equal(served.valid, [*batch.guidance.valid[3:], *[False] * 4, *batch.guidance.valid[:3]])
    np.testing.assert_array_equal(served.sites["k"].data[6:], batch.guidance.sites["k"].data[:3, :1])
    assert list(served.sites) == ["expert_input", "k"]  # layer 2 has no v here
    assert not cache.slices([77], [4]).valid.any()
    assert (cache.stats().hits, cache.stats().missing) == (2, 3)
    with pytest.raises(ValueError, match="^lengths: sample 5 has 3 stored tokens, 4"):
        cache.slices([5], [4])


def test_budget_is_never_exceeded_and_the_longest_unused_goes_first(folder):
    batches = [random_trajectories([4, 4], seed, first_id=2 * seed) for seed in range(5)]
    size = max(batch_size(batch) for batch in batches)
    cache = open_cache(folder, 3 * size)
    for batch in batches[:3]:
        cache.put(batch)
    assert cache.keys().tolist() == [0, 1, 2, 3, 4, 5]
    cache.get([1])  # the first batch is now the one used last
    cache.put(batches[3])
    assert cache.keys().tolist() == [4, 5, 0, 1, 6, 7]
    cache.put(batches[4])
    assert cache.keys().tolist() == [0, 1, 6, 7, 8, 9]
    stats = cache.stats()
    assert (stats.evicted, stats.samples, stats.batches) == (4, 6, 3) and stats.bytes <= stats.budget_bytes
    assert cache.get([2, 0]).sample_id.tolist() == [0]
    if folder:
        assert sum(data_files(folder).values()) == stats.bytes


def test_budget_may_be_reduced_at_restart(tmp_path):
    cache = open_cache(tmp_path)
    batches = [random_trajectories([4], seed, first_id=seed) for seed in range(4)]
    for batch in batches:
        cache.put(batch)
    assert open_cache(tmp_path, 2 * max(map(batch_size, batches))).keys().tolist() == [2, 3]


def test_what_cannot_be_stored_is_refused(folder):
    cache = open_cache(folder, 5000)
    with pytest.raises(UserError, match="raise guidance.cache_budget_mb"):
        cache.put(random_trajectories([200]))
    with pytest.raises(ValueError, match="^guidance: the trajectories carry no record"):
        cache.put(random_trajectories([2], guidance=None))
    with pytest.raises(ValueError, match="^sample_id"):
        cache.put(random_trajectories([1, 1]).replace(sample_id=np.zeros(2, np.uint64)))
    cache.put(Trajectories.concat([random_trajectories([2])]))
    with pytest.raises(ValueError, match="form differs"):
        cache.put(random_trajectories([2], guidance="codes"))
    with pytest.raises(UserError, match="budget_bytes"):
        GuidanceCache(0)
    assert cache.keys().tolist() == [0]


def test_a_sample_put_again_replaces_the_old_one(folder):
    cache = open_cache(folder)
    cache.put(random_trajectories([3, 3], 1, first_id=0))
    newer = random_trajectories([5], 2, first_id=1)
    cache.put(newer)
    assert_same(cache.get([1]), newer)
    assert cache.stats().samples == 2
    cache.put(random_trajectories([2], 3, first_id=0))
    assert cache.stats().batches == 2  # nothing live was left in the first batch
    if folder:
        assert_same(GuidanceCache.open(folder).get([1]), newer)


def test_convert_makes_the_record_smaller(folder):
    batch = random_trajectories([4, 1, 3], guidance="codes", audit=True)
    cache = open_cache(folder)
    cache.put(batch)
    newer = random_trajectories([2], 5, first_id=1, guidance="codes")
    cache.put(newer)  # sample 1 of the first batch is dead and not converted
    before = cache.stats().bytes
    cache.convert("mantissa", [3])
    assert cache.stats().bytes < before
    kept = [part.replace(guidance=part.guidance.to_compact("mantissa", [3]), audit=None) for part in (batch.select([0, 2]), newer)]
    expected = Trajectories.concat(kept)
    assert_same(cache.get([0, 2, 1]), expected)
    with pytest.raises(ValueError, match="cannot become"):
        cache.convert("codes")
    assert_same(cache.get([0, 2, 1]), expected)
    if folder:
        assert_same(GuidanceCache.open(folder).get([0, 2, 1]), expected)
        assert len(data_files(folder)) == 2
    cache.put(random_trajectories([2], 4, first_id=50, layer_ids=(3,)))
    assert cache.stats().samples == 4
