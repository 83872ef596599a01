"""The guidance record: exact sizes, smaller forms, joining."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import assert_same, pack, random_record, random_site

from pallas_kernels import mantissa_bits
from trace_jax.guidance import GuidanceRecord, SiteRecord
from trace_jax.guidance.compact import code_low_bits


def zeros_record(kind, layers, kv_layers, size, kv_heads, head_dim, block_format="nvfp4", num_tokens=3):
    rng = np.random.default_rng(0)
    sites = {
        "expert_input": random_site(rng, num_tokens, layers, (), size, kind, block_format),
        "k": random_site(rng, num_tokens, kv_layers, (kv_heads,), head_dim, kind, block_format),
        "v": random_site(rng, num_tokens, kv_layers, (kv_heads,), head_dim, kind, block_format),
    }
    return GuidanceRecord(kind, sites, np.ones(num_tokens, bool), np.zeros(num_tokens, np.int32))


QWEN_KV_LAYERS = list(range(3, 40, 4))


def test_t4_bytes_per_token_of_the_published_example():
    """Qwen3.5-35B-A3B: 40 layers, hidden 2048, 2 KV heads x 256 in every 4th layer (method note, section 5)."""
    full = zeros_record("codes", range(40), QWEN_KV_LAYERS, 2048, 2, 256)
    full.validate(3)
    sizes = full.bytes_per_token()
    assert sizes["expert_input"] == 46_080
    assert sizes["k"] + sizes["v"] == 5_760
    compact = full.to_compact("mantissa", range(20, 40))
    compact.validate(3)
    sizes = compact.bytes_per_token()
    assert sizes["expert_input"] == 7_680
    assert sizes["k"] + sizes["v"] == 960
    assert compact.sites["k"].layer_ids.tolist() == [23, 27, 31, 35, 39]


@pytest.mark.parametrize(("kind", "bits"), [("scales", 0), ("mantissa", 1), ("codes", 4)])
@pytest.mark.parametrize(("block_format", "block"), [("nvfp4", 16), ("mxfp4", 32)])
def test_t4_bytes_follow_the_formula(kind, bits, block_format, block):
    size, heads, head_dim, layers = 96, 3, 64, [1, 4, 5]
    record = zeros_record(kind, layers, layers[1:], size, heads, head_dim, block_format)
    record.validate(3)
    sizes = record.bytes_per_token()
    assert sizes["expert_input"] == 3 * (bits * size / 8 + size / block)
    assert sizes["k"] == sizes["v"] == 2 * heads * (bits * head_dim / 8 + head_dim / block)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.sampled_from(["scales", "mantissa", "codes"]), st.booleans(), st.booleans())
def test_total_counts_every_byte_of_every_array(num_tokens, kind, per_token, flags):
    record = random_record(np.random.default_rng(0), num_tokens, kind, per_token=per_token)
    if flags:
        own = dataclasses.replace(record.sites["k"], version=np.zeros(num_tokens, np.int32))
        record = dataclasses.replace(record, recomputed=np.zeros(num_tokens, bool), sites={**record.sites, "k": own})
    record.validate(num_tokens)
    total = record.bytes_per_token()["total"]
    assert round(total * num_tokens) == record.nbytes == sum(array.nbytes for array in record.arrays().values())
    assert record.blank(0).bytes_per_token()["constants"] == 0


@given(st.sampled_from((1, 2, 7, 8, 9, 33)), st.integers(0, 3), st.integers(0, 99))  # each shape is compiled
def test_t7_low_bits_of_codes(size, rows, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (rows, 2, size), dtype=np.uint8)
    np.testing.assert_array_equal(code_low_bits(pack(codes, 4), size), pack(codes & 1, 1))
    np.testing.assert_array_equal(code_low_bits(pack(codes, 4), size), np.asarray(mantissa_bits(pack(codes, 4), size)))  # pyright: ignore


def test_t7_low_bits_of_every_code_and_of_dirty_padding():
    codes = np.arange(16, dtype=np.uint8)
    assert code_low_bits(pack(codes, 4), 16).tolist() == [0xAA, 0xAA]
    assert code_low_bits(np.asarray([0x18], np.uint8), 2).tolist() == [0b10]  # code 8 (-0) counts as an even code
    assert code_low_bits(np.asarray([0xFF], np.uint8), 1).tolist() == [1]  # the unused high nibble is not a value


def test_smaller_forms_and_what_they_cannot_become():
    full = random_record(np.random.default_rng(1), 5, "codes", (1, 2, 3))
    bits = full.to_compact("mantissa", [2, 3])
    bits.validate(5)
    assert bits.sites["k"].layer_ids.tolist() == [2, 3] and bits.sites["v"].layer_ids.tolist() == [3]
    np.testing.assert_array_equal(bits.sites["k"].scales, full.sites["k"].scales[:, 1:])
    np.testing.assert_array_equal(bits.sites["k"].multiplier, full.sites["k"].multiplier[1:])
    np.testing.assert_array_equal(bits.sites["k"].data, code_low_bits(full.sites["k"].data[:, 1:], 24))
    assert_same(full.to_compact("scales"), full.to_compact("mantissa").to_compact("scales"))
    assert_same(full.to_compact("codes", [1, 3]), full.take_layers([3, 1]))
    assert "v" not in full.to_compact("mantissa", [1, 2]).sites
    with pytest.raises(ValueError, match="'mantissa' record cannot become 'codes'"):
        bits.to_compact("codes")
    with pytest.raises(ValueError, match="'scales' record"):
        full.to_compact("scales").to_compact("mantissa")


def test_layers_are_a_view_when_adjacent():
    record = random_record(np.random.default_rng(1), 4, "mantissa", (1, 2, 3))
    assert np.shares_memory(record.take_layers([2, 3]).sites["k"].data, record.sites["k"].data)


def test_joining_keeps_every_multiplier():
    first, second = (random_record(np.random.default_rng(seed), 3) for seed in (1, 2))
    same = GuidanceRecord.concat([first, first], [3, 3])
    assert same.sites["k"].multiplier.shape == (2,)
    joined: Any = GuidanceRecord.concat([first, None, second], [3, 2, 3])
    joined.validate(8)
    multiplier = joined.sites["k"].multiplier
    assert multiplier.shape == (8, 2)
    np.testing.assert_array_equal(multiplier[:3], np.tile(np.asarray(first.sites["k"].multiplier), (3, 1)))
    np.testing.assert_array_equal(multiplier[5:], np.tile(np.asarray(second.sites["k"].multiplier), (3, 1)))
    assert not joined.valid[3:5].any()
    # A part without tokens has no say in the multiplier.
    assert GuidanceRecord.concat([second.blank(0), first], [0, 3]).sites["k"].multiplier.shape == (2,)


def test_joining_keeps_versions_and_flags():
    first = random_record(np.random.default_rng(1), 2)
    late = dataclasses.replace(first.sites["k"], version=np.asarray([7, 8], np.int32))
    second = dataclasses.replace(first, recomputed=np.asarray([True, False]), sites={**first.sites, "k": late})
    joined = GuidanceRecord.concat([first, second, None], [2, 2, 1])
    joined.validate(5)
    assert joined.recomputed.tolist() == [False, False, True, False, False]
    assert joined.sites["k"].version.tolist() == [*first.version.tolist(), 7, 8, 0]
    assert joined.sites["v"].version is None


@pytest.mark.parametrize(
    "other",
    [
        random_record(np.random.default_rng(0), 2, "codes"),
        random_record(np.random.default_rng(0), 2, "mantissa", (1, 3)),
        random_record(np.random.default_rng(0), 2, "mantissa", block_format="mxfp4"),
    ],
)
def test_records_of_other_form_are_not_joined(other):
    with pytest.raises(ValueError, match="cannot be joined"):
        GuidanceRecord.concat([random_record(np.random.default_rng(0), 2), other], [2, 2])


def test_mxfp4_has_no_multiplier_and_nvfp4_needs_one():
    site = random_site(np.random.default_rng(0), 2, (0,), (), 64, "mantissa", "mxfp4")
    assert isinstance(site, SiteRecord) and site.multiplier is None
    site.validate("mantissa", 2, "site")
    with pytest.raises(ValueError, match="site.multiplier"):
        dataclasses.replace(site, multiplier=np.ones(1, np.float32)).validate("mantissa", 2, "site")
    with pytest.raises(ValueError, match="site.format"):
        dataclasses.replace(site, block=16).validate("mantissa", 2, "site")
    with pytest.raises(ValueError, match="site.data"):
        site.validate("scales", 2, "site")
