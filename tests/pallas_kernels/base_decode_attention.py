"""What every implementation of `decode_attention` and `append` must do. Subclasses name the implementation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, Quantized, oracle
from pallas_kernels.decode_attention.api import decode_attention
from pallas_kernels.decode_attention.paged_kv import PagedKV
from pallas_kernels.kv_append.api import append
from tests.pallas_kernels.cases import BF16, code_value, mismatches

PAGE, MAX_PAGES, KV_HEADS = 16, 3, 2
LENGTHS = (0, 1, 16, 17, 45, 48)
"""No token, one, a full page, one more, a part of the last page, all pages."""

CASES = ((128, NVFP4, 4), (64, NVFP4, 1), (256, MXFP4, 8))
"""(head_dim, format, query heads of a KV head)."""

MULTIPLIERS = np.float32(2.0**-8), np.float32(2.0**-7)


def paged(codes, scales):
    """The words of a page as the docstring of PagedKV has them: four codes, and the scales of block i and i + blocks/2."""
    pairs = scales.shape[-1] // 2
    return codes.view("<u2"), scales[..., :pairs] + scales[..., pairs:].astype(np.uint16) * 256


def unpaged(words, pairs):
    """(code bytes, scale bytes) of the words of a page."""
    words, pairs = np.array(words, order="C"), np.asarray(pairs)
    return words.view(np.uint8), np.concatenate([pairs % 256, pairs // 256], axis=-1).astype(np.uint8)


def problem(head_dim, fmt, group, lengths=LENGTHS, seed=0, pages=MAX_PAGES, page_size=PAGE, kv_heads=KV_HEADS):
    """(query, cache) with random tokens in every slot, those beyond the lengths included, and the pages in random order."""
    rng = np.random.default_rng(seed)
    count = len(lengths) * pages
    sides = {}
    for name, multiplier in zip(("key", "value"), MULTIPLIERS, strict=True):
        x = (rng.normal(size=(count + 1, kv_heads, page_size, head_dim)) * np.exp(rng.normal(size=(kv_heads, page_size, 1)))).astype(BF16)
        q = oracle.quantize(x, fmt, multiplier if fmt.has_multiplier else None)
        sides[f"{name}_codes"], sides[f"{name}_scales"] = (jnp.asarray(each) for each in paged(q.codes, q.scales))
        sides[f"{name}_multiplier"] = jnp.asarray(multiplier) if fmt.has_multiplier else None
    table = jnp.asarray(rng.permutation(count + 1)[:count].reshape(len(lengths), pages), jnp.int32)
    cache = PagedKV(**sides, page_table=table, lengths=jnp.asarray(lengths, jnp.int32), fmt=fmt)
    query = rng.normal(size=(len(lengths), kv_heads * group, head_dim)).astype(BF16)
    return jnp.asarray(query), cache


def dequantized(cache, sequence):
    """float64 keys and values [K, S, D] of one sequence."""
    length, table = int(cache.lengths[sequence]), np.asarray(cache.page_table)[sequence]
    both = []
    sides = (cache.key_codes, cache.key_scales, cache.key_multiplier), (cache.value_codes, cache.value_scales, cache.value_multiplier)
    for words, pairs, multiplier in sides:
        codes, scales = unpaged(words, pairs)
        multiplier = None if multiplier is None else np.asarray(multiplier)
        x = oracle.dequantize(Quantized(codes, scales, multiplier, cache.head_dim, cache.fmt), np.float32).astype(np.float64)
        tokens = [x[table[position // cache.page_size], :, position % cache.page_size] for position in range(length)]
        both.append(np.stack(tokens, axis=1) if tokens else np.zeros((x.shape[1], 0, cache.head_dim)))
    return both


def attention(query, cache, scale):
    """float64 (output, sum of weights times |values|), both [B, H, D]: softmax attention over the dequantized tokens."""
    query = np.asarray(query).astype(np.float64)
    out, size = np.zeros_like(query), np.zeros_like(query)
    for sequence in np.flatnonzero(np.asarray(cache.lengths)):
        k, v = dequantized(cache, sequence)
        for head in range(query.shape[1]):
            kv_head = head * k.shape[0] // query.shape[1]
            scores = k[kv_head] @ query[sequence, head] * scale
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[sequence, head], size[sequence, head] = weights @ v[kv_head], weights @ np.abs(v[kv_head])
    return out, size


def worst(actual, query, cache, scale):
    """The largest error in units of what BF16 explains: half a last place (2^-9) of each weight, so of the sum of weights times
    |values|, and of the output. Exactly computed scores are assumed; 2 leaves room for their float32 sums."""
    expected, size = attention(query, cache, scale)
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return (np.abs(actual - expected) / (2.0**-9 * (size + np.abs(expected)) + 1e-30)).max()


class DecodeAttentionBase:
    """Comparison with a float64 oracle within BF16 accumulation error, and what must change nothing or everything."""

    implementation: str

    def attend(self, query, cache):
        return decode_attention(query, cache, cache.head_dim**-0.5, implementation=self.implementation)

    def error(self, query, cache, read=None):
        """Of the output over the cache `read` against the oracle over `cache`."""
        return worst(self.attend(query, cache if read is None else read), query, cache, cache.head_dim**-0.5)

    @pytest.mark.parametrize(("head_dim", "fmt", "group"), CASES)
    def test_equals_the_oracle_on_ragged_lengths(self, head_dim, fmt, group):
        query, cache = problem(head_dim, fmt, group)
        assert self.error(query, cache) < 2
        assert not np.asarray(self.attend(query, cache))[0].any()  # length 0

    @pytest.mark.parametrize("wrong", ("page table", "scale", "length", "multiplier", "key and value"))
    def test_the_comparison_sees_a_wrong_cache(self, wrong):
        query, cache = problem(*CASES[0])
        changes = {
            "page table": {"page_table": cache.page_table[:, ::-1]},
            "scale": {"key_scales": jnp.roll(cache.key_scales, 1, axis=-1)},
            "length": {"lengths": jnp.maximum(cache.lengths - 1, 0)},
            "multiplier": {"key_multiplier": cache.value_multiplier},
            "key and value": {"value_codes": cache.key_codes},
        }
        assert self.error(query, cache, dataclasses.replace(cache, **changes[wrong])) > 4

    def test_a_sequence_does_not_see_its_batch(self):
        query, cache = problem(*CASES[0])
        order = jnp.asarray([3, 0, 5, 1, 4, 2])
        shuffled = dataclasses.replace(cache, page_table=cache.page_table[order], lengths=cache.lengths[order].at[2].set(7))
        first, second = np.asarray(self.attend(query, cache))[order], np.asarray(self.attend(query[order], shuffled))
        kept = [0, 1, 3, 4, 5]
        assert mismatches(second[kept], first[kept]) == 0 and mismatches(second[2], first[2]) > 0

    def test_unused_page_numbers_are_not_read(self):
        query, cache = problem(*CASES[0])
        used = np.arange(MAX_PAGES) * PAGE < np.asarray(cache.lengths)[:, None]
        other = dataclasses.replace(cache, page_table=jnp.where(jnp.asarray(used), cache.page_table, -1))
        assert mismatches(self.attend(query, other), self.attend(query, cache)) == 0

    @pytest.mark.parametrize("fmt", (NVFP4, MXFP4), ids=lambda fmt: fmt.name)
    def test_nan_scales_reach_their_own_outputs_only(self, fmt):
        (head_dim, _, group), bad = next(case for case in CASES if case[1] is fmt), 0x7F if fmt is NVFP4 else 0xFF
        query, cache = problem(head_dim, fmt, group)
        table, clean = np.asarray(cache.page_table), np.asarray(self.attend(query, cache))

        def spoiled(side, sequence, position, head, block):
            codes, scales = unpaged(getattr(cache, f"{side}_codes"), getattr(cache, f"{side}_scales"))
            scales[table[sequence, position // PAGE], head, position % PAGE, block] = bad
            return np.asarray(self.attend(query, dataclasses.replace(cache, **{f"{side}_scales": jnp.asarray(paged(codes, scales)[1])})))

        blocks = head_dim // fmt.block
        for position, block in ((0, 0), (44, blocks - 1)):  # in a full tile and in the last, partly filled one
            nan = np.isnan(spoiled("key", 4, position, 1, block).astype(np.float32))
            assert nan[4, group:].all() and nan.sum() == group * head_dim
            nan = np.isnan(spoiled("value", 4, position, 1, block).astype(np.float32))
            assert nan[4, group:, block * fmt.block :][:, : fmt.block].all() and nan.sum() == group * fmt.block
        for side in ("key", "value"):
            assert mismatches(spoiled(side, 4, 45, 1, 0), clean) == 0  # a slot without a token

    def test_every_scale_and_code_decodes_exactly(self):
        """With one token the output is its value: every E4M3 scale (subnormals included) and every code, bit for bit."""
        head_dim, fmt, group = CASES[0]
        query, cache = problem(head_dim, fmt, group, lengths=(1,) * len(LENGTHS))
        blocks = head_dim // fmt.block
        per_call = len(LENGTHS) * KV_HEADS * blocks
        codes = oracle.pack_codes(np.random.default_rng(1).permuted(np.tile(np.arange(16), (0x7F, 1)), axis=1).astype(np.uint8))
        for start in range(0, 0x7F, per_call):
            byte = (start + np.arange(per_call)).clip(max=0x7E).reshape(len(LENGTHS), KV_HEADS, blocks)
            all_codes, all_scales = unpaged(cache.value_codes, cache.value_scales)
            pages = np.asarray(cache.page_table)[:, 0]
            all_scales[pages, :, 0] = byte
            all_codes[pages, :, 0] = codes[byte].reshape(len(LENGTHS), KV_HEADS, -1)
            words, pairs = (jnp.asarray(each) for each in paged(all_codes, all_scales))
            out = self.attend(query, dataclasses.replace(cache, value_codes=words, value_scales=pairs))
            value = (
                code_value(oracle.unpack_codes(codes[byte], 16))
                * oracle.scale_values(byte.astype(np.uint8), fmt)[..., None]
                * MULTIPLIERS[1]
            )
            expected = np.repeat(value.reshape(len(LENGTHS), KV_HEADS, head_dim), group, axis=1)
            np.testing.assert_array_equal(np.asarray(out).astype(np.float64), expected)


class AppendBase:
    """Bytes of the oracle in the right slots and nothing else."""

    implementation: str

    def append(self, cache, keys, values, positions):
        return append(cache, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(positions, jnp.int32), implementation=self.implementation)

    @pytest.mark.parametrize(("head_dim", "fmt", "group"), CASES[1:])
    def test_writes_the_bytes_of_the_oracle_and_nothing_else(self, head_dim, fmt, group):
        """New tokens in order, across a page boundary, a negative position, one beyond the table, a page that is not there."""
        _, cache = problem(head_dim, fmt, group, lengths=(15, 3, 0, 40))
        cache = dataclasses.replace(cache, page_table=cache.page_table.at[3, 2].set(99).at[2, 1].set(-1))
        positions = np.array([[15, 16], [-1, 3], [16, 7], [40, 48]])
        kept = np.array([[True, True], [False, True], [False, True], [False, False]])
        rng = np.random.default_rng(2)
        x = [rng.normal(size=(4, 2, KV_HEADS, head_dim)).astype(BF16) for _ in range(2)]
        x[0][0, 1, 1, 5] = np.nan
        written = self.append(cache, x[0], x[1], positions)
        assert written.lengths.tolist() == [17, 4, 8, 40]
        for side, new, multiplier in zip(("key", "value"), x, MULTIPLIERS, strict=True):
            q = oracle.quantize(new, fmt, multiplier if fmt.has_multiplier else None)
            before = unpaged(getattr(cache, f"{side}_codes"), getattr(cache, f"{side}_scales"))
            after = unpaged(getattr(written, f"{side}_codes"), getattr(written, f"{side}_scales"))
            for expected, actual, update in zip(before, after, (q.codes, q.scales), strict=True):
                for sequence, token in np.argwhere(kept):
                    position = positions[sequence, token]
                    expected[int(cache.page_table[sequence, position // PAGE]), :, position % PAGE] = update[sequence, token]
                assert mismatches(actual, expected) == 0

    def test_tokens_one_by_one_and_all_at_once_give_equal_caches(self):
        head_dim, fmt, _ = CASES[1]
        _, cache = problem(head_dim, fmt, 1, lengths=(0, 0, 0, 0))
        x = np.random.default_rng(3).normal(size=(2, 4, 2, KV_HEADS, head_dim)).astype(BF16)
        positions = np.tile([15, 16], (4, 1))
        step = jax.jit(lambda cache, k, v, positions: append(cache, k, v, positions, implementation=self.implementation), donate_argnums=0)
        whole = self.append(cache, x[0], x[1], positions)
        for token in range(2):
            at = slice(token, token + 1)
            cache = step(cache, *(jnp.asarray(each[:, at]) for each in x), jnp.asarray(positions[:, at], jnp.int32))
        for first, second in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
