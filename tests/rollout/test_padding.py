"""Padded and packed views, and the division into micro-batches."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import assert_same, random_trajectories

from trace_jax.rollout.micro_batches import length_buckets, plan_micro_batches
from trace_jax.rollout.padding import pack_batch, pad_batch

ragged = st.lists(st.integers(0, 7), min_size=0, max_size=6)


def token_fields(batch):
    """Every [B, T, ...] array of a padded batch, tokens in front."""
    fields = {name: getattr(batch, name) for name in ("tokens", "positions", "sampled", "logprobs", "weight_version", "routed_experts")}
    fields["valid"] = batch.guidance.valid
    for name, site in batch.guidance.sites.items():
        fields[f"{name}.data"] = np.moveaxis(site.data, 0, 2)
        fields[f"{name}.scales"] = np.moveaxis(site.scales, 0, 2)
        if site.multiplier is not None and site.multiplier.ndim == 3:
            fields[f"{name}.multiplier"] = np.moveaxis(site.multiplier, 0, 2)
    return fields


@settings(max_examples=40, deadline=None)
@given(ragged, st.integers(0, 99), st.integers(0, 2), st.booleans(), st.data())
def test_padded_rows_hold_the_sequences_and_nothing_else(lengths, seed, extra_rows, per_token, data):
    batch = random_trajectories(lengths, seed, per_token=per_token)
    order = data.draw(st.permutations(range(len(lengths))))
    length = max([*lengths, 1]) + data.draw(st.integers(0, 3))
    padded = pad_batch(batch, order, length, len(order) + extra_rows)
    assert padded.shape == (len(order) + extra_rows, length)
    real = padded.segment_ids == 1
    np.testing.assert_array_equal(real.sum(axis=1), [*(lengths[i] for i in order), *[0] * extra_rows])
    for row, index in enumerate(order):
        one = batch.sequence(index)
        size = lengths[index]
        np.testing.assert_array_equal(padded.tokens[row, :size], one.tokens)
        np.testing.assert_array_equal(padded.positions[row, :size], np.arange(size))
        np.testing.assert_array_equal(padded.sampled[row, :size], one.sampled)
        np.testing.assert_array_equal(padded.logprobs[row, :size], one.logprobs)
        np.testing.assert_array_equal(padded.guidance.valid[row, :size], one.guidance.valid)
        routed = np.where(one.routes.routes_valid[:, None, None], one.routes.routed_experts.astype(np.int32), -1)
        np.testing.assert_array_equal(padded.routed_experts[row, :size], routed)
        for name, site in one.guidance.sites.items():
            shown = padded.guidance.sites[name]
            np.testing.assert_array_equal(shown.data[:, row, :size], np.moveaxis(site.data, 1, 0))
            np.testing.assert_array_equal(shown.scales[:, row, :size], np.moveaxis(site.scales, 1, 0))
            expected = site.multiplier.T if per_token else site.multiplier
            np.testing.assert_array_equal(shown.multiplier[:, row, :size] if per_token else shown.multiplier, expected)
    assert not padded.sampled[~real].any() and not padded.guidance.valid[~real].any() and not padded.logprobs[~real].any()
    assert (padded.routed_experts[~real] == -1).all() and not padded.tokens[~real].any()
    if per_token:
        assert (padded.guidance.sites["k"].multiplier[:, ~real] == 1).all()


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2, 1], [1, 2, 5], [8], [3, 5, 8, 0, 2]])
def test_logp_08_packed_equals_padded_per_token(lengths):
    """Lengths 1, 2 and a full row of 8: at every token a packed batch holds what the padded one holds."""
    batch = random_trajectories(lengths, seed=len(lengths), per_token=True)
    bins, free = [[]], 8
    for index, size in enumerate(lengths):
        if size > free:
            bins.append([])
            free = 8
        bins[-1].append(index)
        free -= size
    packed = pack_batch(batch, bins, 8)
    padded = pad_batch(batch, range(len(lengths)), 8)
    assert packed.shape[0] == len(bins) <= padded.shape[0]
    for name, values in token_fields(packed).items():
        np.testing.assert_array_equal(packed.gather(values), padded.gather(token_fields(padded)[name]), err_msg=name)
    np.testing.assert_array_equal(packed.gather(packed.tokens), batch.tokens)
    for row, members in enumerate(bins):
        expected = np.repeat(np.arange(len(members)) + 1, [lengths[index] for index in members])
        np.testing.assert_array_equal(packed.segment_ids[row, : expected.size], expected)
        assert not packed.segment_ids[row, expected.size :].any()


def test_logp_08_control_a_shift_by_one_token_is_seen():
    batch = random_trajectories([2, 3, 3])
    packed = pack_batch(batch, [[0, 1, 2]], 8)
    assert not np.array_equal(packed.gather(np.roll(packed.logprobs, 1, axis=1)), batch.logprobs)


def test_gather_returns_trainer_values_to_ragged_order():
    batch = random_trajectories([3, 0, 2])
    padded = pad_batch(batch, [2, 0], 4, rows=3)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(padded.gather(values), [0, 1, 4, 5, 6])


def test_scatter_is_the_reverse_of_gather():
    batch = random_trajectories([3, 1, 2])
    packed = pack_batch(batch, [[2, 1], [0]], 4, rows=3)
    values = np.arange(1, 7, dtype=np.float32)
    np.testing.assert_array_equal(packed.scatter(values, -1.0), [[1, 2, 3, -1], [4, 5, 6, -1], [-1] * 4])
    np.testing.assert_array_equal(packed.gather(packed.scatter(values, 0.0)), values)


def test_padding_works_on_views_of_layers_and_on_batches_without_records():
    batch = random_trajectories([3, 2])
    sliced = batch.replace(guidance=batch.guidance.take_layers([3]))
    site = pad_batch(sliced, [0, 1], 3).guidance.sites["k"]
    np.testing.assert_array_equal(site.data, pad_batch(batch, [0, 1], 3).guidance.sites["k"].data[1:])
    bare = pad_batch(random_trajectories([3, 2], guidance=None, routes=False), [1], 3)
    assert bare.guidance is None and bare.routed_experts is None


def test_what_does_not_fit_raises():
    batch = random_trajectories([3, 2])
    with pytest.raises(ValueError, match="^length: a row of 3 tokens does not fit 2"):
        pad_batch(batch, [0, 1], 2)
    with pytest.raises(ValueError, match="^rows"):
        pad_batch(batch, [0, 1], 4, rows=1)
    with pytest.raises(ValueError, match="^length: a row of 5"):
        pack_batch(batch, [[0, 1]], 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 200), max_size=40),
    st.integers(1, 600),
    st.lists(st.integers(1, 128), min_size=1, max_size=4, unique=True),
    st.integers(1, 4),
)
def test_plan_takes_every_sequence_once_and_few_shapes(lengths, tokens, buckets, multiple):
    plan = plan_micro_batches(lengths, tokens, buckets, multiple)
    bins = [members for micro in plan for members in micro.bins]
    assert sorted(index for members in bins for index in members) == list(range(len(lengths))) and all(bins)
    assert plan == plan_micro_batches(np.asarray(lengths, np.int64), tokens, list(reversed(buckets)), multiple)
    for micro in plan:
        assert 0 < len(micro.bins) <= micro.rows and micro.rows % multiple == 0
        assert max(sum(lengths[index] for index in members) for members in micro.bins) <= micro.length
        assert micro.rows * micro.length <= tokens or micro.rows == multiple
    assert len({micro.length for micro in plan}) <= 1  # one length: of the longest sequence, or its bucket
    assert len({micro.rows for micro in plan[:-1]}) <= 1 and all(len(micro.bins) == micro.rows for micro in plan[:-1])
    if plan:
        longest = max(lengths)
        assert plan[0].length in buckets or plan[0].length % max(buckets) == 0
        assert plan[0].length >= longest and not any(longest <= bucket < plan[0].length for bucket in buckets)
        # First fit: what begins a row found no room in any row before it.
        used = [sum(lengths[index] for index in members) for members in bins]
        assert all(used[i] + lengths[bins[j][0]] > plan[0].length for j in range(len(bins)) for i in range(j))


def test_short_sequences_share_a_row_the_longest_first():
    plan = plan_micro_batches([3, 9, 2, 6, 4, 8], micro_batch_tokens=1000, buckets=[6, 12, 24])
    assert plan == [([[1, 0], [5, 4], [3, 2]], 12, 16)]
    assert plan_micro_batches([], 8, [16]) == []


def test_rows_are_capped_by_the_rows_left():
    """128 rows where 170 would fit are not padded to 170; what is left over gets a multiple of 16."""
    assert [micro.rows for micro in plan_micro_batches([90] * 128, 16384, [96])] == [128]
    assert [micro.rows for micro in plan_micro_batches([90] * 171, 16384, [96])] == [170, 16]
    assert [micro.rows for micro in plan_micro_batches([90] * 100, 16384, [96], row_multiple=3)] == [168]


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_equal_size_share_few_shapes_and_waste_little(seed):
    rng = np.random.default_rng(seed)
    batches = [rng.integers(1, 97, 256) for _ in range(50)]
    plans = [plan_micro_batches(lengths, 1 << 16, [48, 96]) for lengths in batches]
    assert len({(micro.length, micro.rows) for plan in plans for micro in plan}) <= 2
    padded = sum(micro.length * micro.rows for plan in plans for micro in plan)
    tokens = sum(int(lengths.sum()) for lengths in batches)
    assert padded < 1.45 * tokens < 256 * 96 * len(batches)  # one sequence a row would pad to twice the tokens


def test_a_row_longer_than_the_micro_batch_stands_alone():
    plan = plan_micro_batches([10, 100, 20, 9], micro_batch_tokens=64, buckets=[16, 32, 64])
    assert plan == [([[1, 2]], 128, 1), ([[0, 3]], 128, 1)]


def test_buckets_halve_and_hold_the_longest():
    assert length_buckets(60) == [16, 32, 64]
    assert length_buckets(100, count=2, multiple=8) == [56, 104]
    assert length_buckets(1, count=3) == [16]
    with pytest.raises(ValueError, match="positive"):
        length_buckets(0)
    with pytest.raises(ValueError, match="positive"):
        plan_micro_batches([1], 0, [16])


def test_micro_batches_together_hold_the_batch():
    batch = random_trajectories([5, 1, 7, 3, 3], seed=9)
    parts = [pack_batch(batch, m.bins, m.length, m.rows) for m in plan_micro_batches(batch.lengths(), 16, [4, 8])]
    tokens = {
        int(i): p.tokens[r, s : s + n] for p in parts for i, r, s, n in zip(p.sequence_indices, p.rows, p.starts, p.lengths, strict=True)
    }
    assert_same(np.concatenate([tokens[i] for i in range(5)]), batch.tokens)
