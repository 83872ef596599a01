"""`decode_attention` and `append` over the paged FP4 cache: the shared tests for each implementation, and what needs no device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4
from pallas_kernels.decode_attention import pallas
from pallas_kernels.decode_attention.api import decode_attention
from pallas_kernels.decode_attention.paged_kv import (
    PagedKV,
    codes_to_words,
    empty_paged_kv,
    scales_to_words,
    words_to_codes,
    words_to_scales,
)
from pallas_kernels.kv_append import pallas as append_pallas
from pallas_kernels.kv_append.api import append
from tests.pallas_kernels.base_decode_attention import CASES, AppendBase, DecodeAttentionBase, paged, problem
from tests.pallas_kernels.cases import random_bytes
from tests.pallas_kernels.test_lowering import lowered

Shape = jax.ShapeDtypeStruct


class TestReference(DecodeAttentionBase, AppendBase):
    implementation = "reference"


class TestPallasInterpreted(DecodeAttentionBase, AppendBase):
    implementation = "pallas"


def shapes(head_dim, fmt, batch=3, kv_heads=2, pages=5, page_size=64, max_pages=4):
    """A cache of shapes, for lowering."""
    codes = Shape((pages, kv_heads, page_size, head_dim // 4), jnp.uint16)
    scales = Shape((pages, kv_heads, page_size, head_dim // fmt.block // 2), jnp.uint16)
    m = Shape((), jnp.float32) if fmt.has_multiplier else None
    table, lengths = Shape((batch, max_pages), jnp.int32), Shape((batch,), jnp.int32)

    def make(codes, scales, m, table, lengths):
        return PagedKV(codes, scales, codes, scales, m, m, table, lengths, fmt)

    return jax.eval_shape(make, codes, scales, m, table, lengths)


@pytest.mark.parametrize(("head_dim", "fmt", "group"), ((64, MXFP4, 5), (128, NVFP4, 4), (256, NVFP4, 16)))
def test_both_kernels_lower_for_cuda(head_dim, fmt, group):
    cache = shapes(head_dim, fmt)
    text = lowered(lambda q, c: pallas.decode_attention(q, c, 0.1, interpret=False), Shape((3, 2 * group, head_dim), jnp.bfloat16), cache)
    assert text.count("gpu.triton") == 2
    new, at = Shape((3, 1, 2, head_dim), jnp.bfloat16), Shape((3, 1), jnp.int32)
    text = lowered(lambda c, k, v, p: append_pallas.append(c, k, v, p, p, interpret=False), cache, new, new, at)
    assert text.count("gpu.triton") == 1


def test_a_bfloat16_copy_of_the_cache_is_nowhere():
    cache = shapes(128, NVFP4, pages=512)
    text = lowered(lambda q, c: pallas.decode_attention(q, c, 0.1, interpret=False), Shape((3, 8, 128), jnp.bfloat16), cache)
    assert "512x2x64x32xui16" in text and "512x2x64x128" not in text and "512x2x64x32xbf16" not in text


def test_words_and_bytes():
    codes, scales = random_bytes((3, 5, 32), 1), random_bytes((3, 5, 4), 2)
    expected = paged(codes, scales)
    words, pairs = codes_to_words(jnp.asarray(codes)), scales_to_words(jnp.asarray(scales))
    np.testing.assert_array_equal(np.asarray(words), expected[0])
    np.testing.assert_array_equal(np.asarray(pairs), expected[1])
    np.testing.assert_array_equal(np.asarray(words_to_codes(words)), codes)
    np.testing.assert_array_equal(np.asarray(words_to_scales(pairs)), scales)


def test_bytes_per_token():
    """3.56 times fewer than BF16: 0.5625 bytes a value."""
    cache = empty_paged_kv(4, 16, 2, 128, np.arange(4).reshape(2, 2), NVFP4, 1.0, 1.0)
    stored = sum(each.nbytes for each in (cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales))
    assert stored == 0.5625 * 2 * (4 * 16 * 2 * 128) and (cache.head_dim, cache.page_size) == (128, 16)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_explained():
    query, cache = problem(*CASES[0])
    new, at = jnp.zeros((6, 1, 2, 128), jnp.bfloat16), jnp.zeros((6, 1), jnp.int32)
    for call, message in (
        (lambda: decode_attention(query[:, :3], cache, 0.1), "multiple of the KV heads"),
        (lambda: decode_attention(query[:2], cache, 0.1), "6 sequences"),
        (lambda: decode_attention(query, cache, 0.0), "scale must be positive"),
        (lambda: append(cache, new, new[:, :, :1], at), "do not fit a cache of 6 sequences"),
        (lambda: empty_paged_kv(1, 16, 2, 48, np.zeros((1, 1), int), NVFP4, 1.0, 1.0), "multiple of 32"),
        (lambda: empty_paged_kv(1, 16, 2, 64, np.zeros((1, 1), int), NVFP4), "takes a multiplier"),
        (lambda: empty_paged_kv(1, 16, 2, 64, np.zeros((1, 1), int), MXFP4, 1.0, 1.0), "takes no multiplier"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_the_kernels_cannot_serve_is_explained():
    query, cache = problem(*CASES[0])
    many = jnp.tile(query, (1, 5, 1))
    odd = dataclasses.replace(
        cache, **{name: getattr(cache, name)[:, :, :12] for name in ("key_codes", "key_scales", "value_codes", "value_scales")}
    )
    for arguments, message in (
        ((query.astype(jnp.float32), cache), "float32"),
        ((many, cache), "16 query heads"),
        ((query, odd), "not 12"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            decode_attention(*arguments, 0.1, implementation="pallas")
        assert decode_attention(*arguments, 0.1).shape == arguments[0].shape
    three = shapes(64, NVFP4, kv_heads=3)
    new, at = Shape((3, 1, 3, 64), jnp.bfloat16), Shape((3, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="power of two"):
        jax.eval_shape(append_pallas.append, three, new, new, at, at)
