"""Division of sequences into packed micro-batches of few distinct shapes, so that jit compiles few programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

ROW_STEP = 16
"""Rows of a micro-batch that is not full are at least a multiple of this."""


class MicroBatch(NamedTuple):
    """Sequences of one micro-batch, packed into rows, and its padded shape.

    Attributes:
        bins: for each row its sequences; at most `rows` of them, the remaining rows are padding.
        length: T.
        rows: B.
    """

    bins: list[list[int]]
    length: int
    rows: int


def length_buckets(max_length: int, count: int = 4, multiple: int = 16) -> list[int]:
    """Up to `count` padded lengths, halving from the smallest multiple of `multiple` that holds `max_length`.

    Halving bounds padding at half of a row; a longer list saves little and compiles more.
    """
    if max_length < 1 or count < 1 or multiple < 1:
        raise ValueError(f"length_buckets: max_length {max_length}, count {count}, multiple {multiple} must all be positive")
    lengths = {-(-max_length // (multiple * 2**step)) * multiple for step in range(count)}
    return sorted(lengths)


def plan_micro_batches(
    lengths: Sequence[int] | Int[np.ndarray, " S"], micro_batch_tokens: int, buckets: Sequence[int], row_multiple: int = 1
) -> list[MicroBatch]:
    """Every sequence into exactly one row of one micro-batch.

    All rows are as long as the smallest bucket that holds the longest sequence, and are filled first fit decreasing. A
    micro-batch has `micro_batch_tokens // length` rows, at least `row_multiple`, so a row longer than `micro_batch_tokens`
    stands alone. Where fewer rows are left, they are rounded up to one of few counts (`_rounded_rows`); only this last
    micro-batch has padding rows. The number of rows follows from the lengths, so without this every batch would be compiled.

    Args:
        lengths: tokens of each sequence.
        micro_batch_tokens: padded tokens of a micro-batch.
        buckets: allowed padded lengths; a sequence longer than all of them gets a multiple of the largest.
        row_multiple: rows are a multiple of this (devices of the data axes).

    Returns:
        Micro-batches; the same input gives the same plan.

    Raises:
        ValueError: a size is not positive.
    """
    if micro_batch_tokens < 1 or row_multiple < 1 or not buckets or min(buckets) < 1:
        raise ValueError(f"micro_batch_tokens {micro_batch_tokens}, row_multiple {row_multiple}, buckets {list(buckets)}: must be positive")
    sizes = np.asarray(lengths, np.int64)
    longest, known = int(sizes.max(initial=0)), sorted(buckets)
    length = next((bucket for bucket in known if bucket >= longest), -(-longest // known[-1]) * known[-1])
    bins = _first_fit_decreasing(sizes, length)
    full = max(micro_batch_tokens // length // row_multiple, 1) * row_multiple
    parts = [bins[start : start + full] for start in range(0, len(bins), full)]
    return [MicroBatch(part, length, min(full, _rounded_rows(len(part), row_multiple))) for part in parts]


def _first_fit_decreasing(sizes: Int[np.ndarray, " S"], capacity: int) -> list[list[int]]:
    """Longest first, each sequence into the first row with room for it."""
    bins: list[list[int]] = []
    room = np.full(sizes.size, capacity, np.int64)
    for index in np.argsort(-sizes, kind="stable").tolist():
        # A row that is not open yet has room, so the search always ends.
        row = int(np.argmax(room >= sizes[index]))
        if row == len(bins):
            bins.append([])
        bins[row].append(index)
        room[row] -= sizes[index]
    return bins


def _rounded_rows(rows: int, multiple: int) -> int:
    """Up to a multiple of a quarter of the next power of two (at least `ROW_STEP`): two counts an octave, a third wasted at most."""
    step = math.lcm(max(ROW_STEP, (1 << (rows - 1).bit_length()) // 4), multiple)
    return -(-rows // step) * step
