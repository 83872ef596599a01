"""Trajectories: contract checks, joining and choosing, files, JSON rows."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import assert_same, random_trajectories
from safetensors.numpy import load_file

from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.rollout import FinishReason, Trajectories
from trace_jax.rollout.array_file import encode_arrays
from trace_jax.rollout.storage import encode_trajectories, json_rows, load_trajectories, write_jsonl

ragged = st.lists(st.integers(0, 7), min_size=0, max_size=6)


class Letters:
    """Token id -> one character."""

    def decode(self, ids):
        return "".join(chr(33 + token) for token in ids)


def test_empty_batch_is_valid():
    Trajectories.empty().validate()
    assert Trajectories.concat([]).num_sequences == 0


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(0, 99), st.data())
def test_select_and_sequence_agree_with_plain_indexing(lengths, seed, data):
    batch = random_trajectories(lengths, seed, audit=True, top=2)
    batch.validate()
    chosen = data.draw(st.permutations(range(len(lengths))).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n])))
    picked = batch.select(chosen)
    picked.validate()
    np.testing.assert_array_equal(picked.lengths(), [lengths[i] for i in chosen])
    for new, old in enumerate(chosen):
        rows = slice(int(batch.offsets[old]), int(batch.offsets[old + 1]))
        one = picked.sequence(new)
        assert_same(one, batch.sequence(old))
        np.testing.assert_array_equal(one.tokens, batch.tokens[rows])
        np.testing.assert_array_equal(one.routes.routed_experts, batch.routes.routed_experts[rows])
        np.testing.assert_array_equal(one.guidance.sites["k"].data, batch.guidance.sites["k"].data[rows])
        assert (one.audit is not None) == (old % 2 == 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(ragged, min_size=1, max_size=4), st.integers(0, 99))
def test_concat_is_the_inverse_of_select(parts, seed):
    batches = [random_trajectories(lengths, seed + i, audit=i % 2 == 0, per_token=True) for i, lengths in enumerate(parts)]
    joined = Trajectories.concat(batches)
    joined.validate()
    assert joined.num_sequences == sum(map(len, parts))
    start = 0
    for batch in batches:
        back = joined.select(range(start, start + batch.num_sequences))
        start += batch.num_sequences
        if batch.num_sequences:
            assert_same(back, batch)


def test_adjacent_selection_is_a_view():
    batch = random_trajectories([3, 4, 5])
    for part in (batch.select([1, 2]), batch.sequence(1)):
        assert np.shares_memory(part.tokens, batch.tokens)
        assert np.shares_memory(part.guidance.sites["k"].data, batch.guidance.sites["k"].data)
        assert np.shares_memory(part.routes.routed_experts, batch.routes.routed_experts)


def test_concat_fills_missing_records_with_invalid_rows():
    joined = Trajectories.concat([random_trajectories([3]), random_trajectories([2], guidance=None, routes=False)])
    joined.validate()
    assert not joined.guidance.valid[3:].any() and not joined.routes.routes_valid[3:].any()


def test_sampled_lengths_counts_drawn_tokens_only():
    batch = random_trajectories([4, 0, 6], seed=3)
    np.testing.assert_array_equal(batch.sampled_lengths(), [batch.sampled[:4].sum(), 0, batch.sampled[4:].sum()])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offsets", np.asarray([0, 4, 3, 7], np.int64)),
        ("offsets", np.asarray([0, 3, 7, 8], np.int64)),
        ("offsets", np.asarray([0, 3, 5, 7], np.int32)),
        ("tokens", np.full(7, -1, np.int32)),
        ("tokens", np.zeros(7, np.int64)),
        ("sampled", np.zeros(7, np.uint8)),
        ("logprobs", np.full(7, -1, np.float32)),
        ("logprobs", np.full(7, np.nan, np.float32)),
        ("weight_version", np.zeros(6, np.int32)),
        ("sample_id", np.zeros(3, np.int64)),
        ("attempt", np.zeros(2, np.uint16)),
        ("temperature", np.full(3, -1, np.float32)),
        ("finish_reason", np.full(3, 9, np.uint8)),
        ("reward", np.zeros(3, np.float64)),
        ("top_ids", np.zeros((7, 2), np.int32)),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_validate_names_the_field(field, value):
    batch = random_trajectories([3, 2, 2])
    with pytest.raises(ValueError, match=f"^{field}: "):
        batch.replace(**{field: value}).validate()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda g: {"valid": g.valid[:-1]}, "guidance.valid"),
        (lambda g: {"version": g.version.astype(np.int64)}, "guidance.version"),
        (lambda g: {"kind": "codes"}, "guidance.expert_input.data"),
        (lambda g: {"sites": {"k": dataclasses.replace(g.sites["k"], scales=g.sites["k"].scales[:, :1])}}, "guidance.k.scales"),
        (lambda g: {"sites": {"k": dataclasses.replace(g.sites["k"], multiplier=np.zeros(2, np.float32))}}, "guidance.k.multiplier"),
        (lambda g: {"sites": {"k": dataclasses.replace(g.sites["k"], layer_ids=np.asarray([3, 2], np.int32))}}, "guidance.k.layer_ids"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_validate_names_the_guidance_field(change, field):
    batch = random_trajectories([3, 2, 2])
    broken = dataclasses.replace(batch.guidance, **change(batch.guidance))
    with pytest.raises(ValueError, match=f"^{field}: "):
        batch.replace(guidance=broken).validate()


@settings(max_examples=20, deadline=None)
@given(ragged, st.integers(0, 99), st.booleans(), st.sampled_from([None, "scales", "mantissa", "codes"]))
def test_file_round_trip(tmp_path_factory, lengths, seed, extras, kind):
    path = tmp_path_factory.mktemp("files") / "batch.safetensors"
    batch = random_trajectories(lengths, seed, guidance=kind, routes=extras, audit=extras, top=3 * extras, per_token=extras)
    write_atomic(path, encode_trajectories(batch))
    assert_same(load_trajectories(path), batch)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_file_opens_with_the_safetensors_library(tmp_path):
    batch = random_trajectories([3, 2])
    write_atomic(tmp_path / "x.safetensors", encode_trajectories(batch))
    arrays = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(arrays["tokens"], batch.tokens)
    np.testing.assert_array_equal(arrays["guidance.sites.k.data"], batch.guidance.sites["k"].data)


def test_ckpt_09_truncated_or_flipped_files_are_refused_by_name(tmp_path):
    path = tmp_path / "batch.safetensors"
    write_atomic(path, encode_trajectories(random_trajectories([5, 4])))
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in [0, 3, 8, 100, len(content) - 1, *rng.integers(0, len(content), 20).tolist()]:
        path.write_bytes(content[:cut])
        with pytest.raises(UserError, match="batch.safetensors"):
            load_trajectories(path)
    for position in [0, 9, len(content) - 1, *rng.integers(0, len(content), 60).tolist()]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="batch.safetensors"):
            load_trajectories(path)
    path.write_bytes(content)
    load_trajectories(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "batch.safetensors"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_atomic(path, chunks())
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(tmp_path / "no" / "folder.safetensors", encode_trajectories(Trajectories.empty()))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_trajectories(tmp_path / "absent.safetensors")
    write_atomic(tmp_path / "other.safetensors", encode_arrays({"x": np.zeros(3, np.int32)}, {"content": "something"}))
    with pytest.raises(UserError, match="something"):
        load_trajectories(tmp_path / "other.safetensors")


def test_json_rows(tmp_path):
    batch = random_trajectories([4, 2, 3]).replace(
        tokens=np.arange(9, dtype=np.int32),
        sampled=np.asarray([0, 0, 1, 1, 0, 0, 0, 1, 0], bool),
        logprobs=np.zeros(9, np.float32),
        weight_version=np.asarray([0, 0, 3, 4, 0, 0, 0, 2, 0], np.int32),
        reward=np.asarray([0.5, np.nan, 1], np.float32),
        finish_reason=np.asarray([0, 1, 2], np.uint8),
        sample_id=np.asarray([2**64 - 1, 1, 2], np.uint64),
    )
    write_jsonl(tmp_path / "rows.jsonl", json_rows(batch, Letters()))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ['!"', "%&", "'"]
    assert [row["completion"] for row in rows] == ["#$", "", "()"]
    assert [row["reward"] for row in rows] == [0.5, None, 1.0]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "aborted"]
    assert rows[0]["sample_id"] == 2**64 - 1 and rows[0]["tokens"] == [0, 1, 2, 3]
    assert [row["weight_version"] for row in rows] == [[3, 4], None, [2, 2]]


def test_json_rows_keep_half_characters_and_refuse_nan(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a\udce4\U0001f600"}])
    assert json.loads((tmp_path / "rows.jsonl").read_text("utf-8")) == {"text": "a\udce4\U0001f600"}
    with pytest.raises(ValueError, match="JSON"):
        write_jsonl(tmp_path / "rows.jsonl", [{"reward": float("nan")}])


def test_finish_reasons_fit_the_column():
    assert [reason.name for reason in FinishReason] == ["STOP", "LENGTH", "ABORTED"]
