"""Decode attention as Pallas kernels: flash decoding over splits of each sequence, then a small kernel that merges the splits.

1. A program takes one sequence, one KV head and one split, and walks over tiles of tokens. Its group of query heads, padded to the 16
   rows of a tensor core, meets a tile of keys that is decoded in registers (`packed_tile`); the cache is never dequantized in memory.
2. Scores become weights under a running maximum, in float32 and to the base 2, and weigh the decoded values.
3. Each split leaves its unnormalized sums, maximum and total; `combine` merges them.

Head_dim is cut in eight: into halves, as the bytes of the scale words are, and each by `index % 4`, as the codes of a word are. Eight small
products, each over the words of half a row, add up to the scores; eight give every fourth value of half the output.

The sequences and KV heads of a batch rarely fill a GPU, hence the splits. A program is one warp: it exchanges nothing with other warps,
and a dozen or more of them on a multiprocessor cover each other's waits.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int16, Int32

from pallas_kernels import tilings
from pallas_kernels.decode_attention import combine
from pallas_kernels.decode_attention.packed_tile import decode_tile, invalid_scales, value_exponent
from pallas_kernels.decode_attention.paged_kv import PagedKV
from pallas_kernels.device import interpreted
from pallas_kernels.formats import BlockFormat

_ROWS = 16  # query heads of a program after padding, the least a tensor core takes
_INTERPRET_SPLITS = 3  # so that tests meet several
_MOST_SPLITS = 256  # `combine` holds an eighth of a row of each
_LARGEST_OFFSET = 2**31 - 1
_HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the work is cut; `choose` picks it, benchmarks try others.

    Args:
      splits: programs that share a sequence and KV head.
      tile: tokens of one step, a power of two that divides the page.
      warps: warps of a program.
      stages: tiles in flight, counting the one in use.
    """

    splits: int
    tile: int
    warps: int = 1
    stages: int = 3


def choose(cache: PagedKV, interpret: bool, sizes: tilings.Sizes | None = None) -> Schedule:
    """The schedule for a cache.

    Sizes are those of the device by default: tokens and bytes of codes of a tile at most (on an H200 more than 64 tokens of
    head_dim 128 spill registers), warps, stages, and the programs of one wave (there sixteen on a multiprocessor).
    """
    sizes = sizes or tilings.lookup("decode_attention")
    batch, max_pages = cache.page_table.shape
    tile = min(cache.page_size, sizes["tokens"], sizes["code_bytes"] * 2 // cache.head_dim)
    wanted = _INTERPRET_SPLITS if interpret else sizes["programs"] // (batch * cache.key_codes.shape[1])
    splits = max(1, min(wanted, max_pages * cache.page_size // tile, _MOST_SPLITS))
    return Schedule(splits=splits, tile=tile, warps=sizes["num_warps"], stages=sizes["num_stages"])


def _body(*refs, group: int, scale: float, fmt: BlockFormat, tile: int, interpret: bool):
    table_ref, lengths_ref, query_ref, key_ref, key_scales_ref, value_ref, value_scales_ref, *multiplier_ref, sums_ref, stats_ref = refs
    split, head, sequence = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pages, _, page_size, columns = key_ref.shape
    tiles_per_page = page_size // tile
    length = jnp.minimum(lengths_ref[sequence], table_ref.shape[1] * page_size)
    tiles, whole = pl.cdiv(length, tile), length // tile
    share = pl.cdiv(tiles, pl.num_programs(0))
    first, last = split * share, jnp.minimum(split * share + share, tiles)

    # Rows beyond the group repeat its last head; nobody reads them.
    rows = head * group + jnp.minimum(jnp.arange(_ROWS, dtype=jnp.int32), group - 1)
    halves = _key_halves(columns)
    queries = [_query_part(query_ref, (sequence, rows, halves[half], nibble), half) for half in range(2) for nibble in range(4)]
    gain = scale * math.log2(math.e) * 2.0 ** value_exponent(fmt)
    if fmt.has_multiplier:
        gain = multiplier_ref[0][0] * gain
    value_halves = [pl.ds(half * (columns // 2), columns // 2) for half in range(2)]

    def step(index, carry, partial: bool):
        top, total, key_flags, value_flags, *sums = carry
        page = jnp.clip(table_ref[sequence, index // tiles_per_page], 0, pages - 1)
        at = page, head, pl.ds(index % tiles_per_page * tile, tile)

        def decoded(words_ref, scales, slices):
            whole = slices[0].size == columns
            return [part for half in range(2) for part in decode_tile(words_ref[*at, slices[half]], scales, half, fmt, interpret, whole)]

        key_scales, value_scales = key_scales_ref[*at, :], value_scales_ref[*at, :]
        scores = functools.reduce(jnp.add, map(_dot_rows, queries, decoded(key_ref, key_scales, halves)))
        bad_keys, bad_values = (invalid_scales(each, fmt, interpret) for each in (key_scales, value_scales))
        if partial:
            present = index * tile + jnp.arange(tile, dtype=jnp.int32) < length
            scores = jnp.where(present[None, :], scores, -jnp.inf)
            bad_keys, bad_values = (jnp.where(present[:, None], each, 0) for each in (bad_keys, bad_values))
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * gain)
        weights = jnp.exp2(scores * gain - new_top[:, None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + jnp.sum(weights, axis=1)
        weights = weights.astype(jnp.bfloat16)
        values = decoded(value_ref, value_scales, value_halves)
        sums = [
            part * fade[:, None] + jnp.dot(weights, v, preferred_element_type=jnp.float32) for part, v in zip(sums, values, strict=True)
        ]
        return new_top, total, key_flags | bad_keys, value_flags | bad_values, *sums

    pairs = key_scales_ref.shape[-1]
    flags = jnp.zeros((tile, pairs), jnp.int16)
    zeros = jnp.zeros((_ROWS, columns // 2), jnp.float32)
    carry = (jnp.full((_ROWS,), -jnp.inf, jnp.float32), jnp.zeros((_ROWS,), jnp.float32), flags, flags, *[zeros] * 8)
    # Only the last tile of a sequence can be partly filled; the others are spared the comparisons.
    carry = jax.lax.fori_loop(first, jnp.minimum(last, whole), functools.partial(step, partial=False), carry)
    carry = jax.lax.fori_loop(jnp.maximum(first, whole), last, functools.partial(step, partial=True), carry)
    top, total, key_flags, value_flags, *sums = carry

    written = jnp.broadcast_to((jnp.arange(_ROWS, dtype=jnp.int32) < combine.padded(group))[None, :, None], (1, *zeros.shape))
    for part, values in enumerate(sums):
        bad = _raised(value_flags, part // 4)
        bad = jnp.broadcast_to(bad[:, None], (pairs, zeros.shape[1] // pairs)).reshape(zeros.shape[1])
        pltriton.store(sums_ref.at[pl.ds(part, 1)], jnp.where(bad[None, :] > 0, jnp.nan, values)[None], mask=written)
    bad = jnp.max(jnp.maximum(_raised(key_flags, 0), _raised(key_flags, 1)), axis=0)
    stats_ref[0] = top
    stats_ref[1] = jnp.where(bad > 0, jnp.nan, total)


def _key_halves(columns: int) -> list[Any]:
    """The columns of a row of words that go into the products for the low and for the high scale bytes.

    A product needs 16 columns. A head of 64 has only eight in each half, so both take the whole row, and `_query_part` has zeros
    where the scale is the other half's.
    """
    half = columns // 2
    return [pl.ds(0, columns)] * 2 if half < 16 else [pl.ds(0, half), pl.ds(half, half)]


def _query_part(query_ref, at, half: int) -> Float[Array, "m c"]:
    query = query_ref[at]
    columns = query_ref.shape[2]
    if query.shape[1] < columns:
        return query
    second = jnp.arange(columns, dtype=jnp.int32) >= columns // 2
    return jnp.where((second if half else ~second)[None, :], query, 0.0)


def _raised(flags: Int16[Array, "T pairs"], half: int) -> Int32[Array, " pairs"]:
    """1 where the flag of the low or high byte is raised in any row."""
    return jnp.max(flags.astype(jnp.int32) >> 7 + 8 * half & 1, axis=0)


def _dot_rows(a: Float[Array, "m c"], b: Float[Array, "n c"]) -> Float[Array, "m n"]:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "schedule"))
def decode_attention(
    query: Float[Array, "B H D"], cache: PagedKV, scale: float, interpret: bool | None = None, schedule: Schedule | None = None
) -> Float[Array, "B H D"]:
    """The attention output, as the reference up to BF16 accumulation. Raises NotImplementedError for what it cannot serve."""
    (batch, heads, _), (_, kv_heads, _, columns) = query.shape, cache.key_codes.shape
    interpret = _check(query, cache, interpret)
    schedule = choose(cache, interpret) if schedule is None else schedule
    group = heads // kv_heads
    multipliers = [] if cache.key_multiplier is None else [cache.key_multiplier.reshape(1)]
    sums, stats = pl.pallas_call(
        functools.partial(
            _body,
            group=group,
            scale=scale,
            fmt=cache.fmt,
            tile=schedule.tile,
            interpret=interpret,
        ),
        grid=(schedule.splits, kv_heads, batch),
        out_specs=[
            pl.BlockSpec((None, None, None, 8, _ROWS, columns // 2), lambda split, head, sequence: (sequence, head, split, 0, 0, 0)),
            pl.BlockSpec((None, None, None, 2, _ROWS), lambda split, head, sequence: (sequence, head, split, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, schedule.splits, 8, _ROWS, columns // 2), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, schedule.splits, 2, _ROWS), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=schedule.warps, num_stages=schedule.stages),
        interpret=interpret,
    )(
        cache.page_table,
        cache.lengths,
        query.reshape(batch, heads, columns, 4),
        cache.key_codes,
        cache.key_scales,
        cache.value_codes,
        cache.value_scales,
        *multipliers,
    )
    return combine.combine(sums, stats, cache.value_multiplier, 2.0 ** value_exponent(cache.fmt), group, query.dtype, interpret)


def _check(query: Float[Array, "B H D"], cache: PagedKV, interpret: bool | None) -> bool:
    """Whether to interpret; raises NotImplementedError if the kernel cannot serve."""
    interpret = interpreted(interpret)
    group = query.shape[1] // cache.key_codes.shape[1]
    if query.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the kernel takes a bfloat16 query, got {query.dtype}")
    if cache.head_dim not in _HEAD_DIMS or group > _ROWS:
        raise NotImplementedError(
            f"the kernel serves head_dim {', '.join(map(str, _HEAD_DIMS))} and up to {_ROWS} query heads a KV head, "
            f"not head_dim {cache.head_dim} and {group}"
        )
    if cache.page_size < 16 or cache.page_size & (cache.page_size - 1):
        raise NotImplementedError(f"the kernel takes pages of 16, 32, 64, ... tokens, not {cache.page_size}")
    if cache.key_codes.size > _LARGEST_OFFSET or 0 in (query.size, cache.key_codes.size, cache.page_table.size):
        raise NotImplementedError(
            f"the kernel addresses 1 to {_LARGEST_OFFSET} words of codes and needs a query, got {cache.key_codes.shape}"
        )
    return interpret
