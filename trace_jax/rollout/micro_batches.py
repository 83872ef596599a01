"""Division of sequences into micro-batches of few distinct shapes, so that jit compiles few programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

ROW_STEP = 16
"""Rows of a micro-batch that is not full are a multiple of this."""


class MicroBatch(NamedTuple):
    """Sequences of one micro-batch and the padded shape they go into.

    Attributes:
        indices: sequences, at most `rows`; the remaining rows are padding.
        length: T.
        rows: B.
    """

    indices: list[int]
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
    """Every sequence into exactly one micro-batch, longest first.

    A micro-batch takes the longest sequence left, the smallest bucket that holds it, and fills its rows with the next
    longest ones. It has `micro_batch_tokens // length` rows, at least `row_multiple`, so a sequence longer than
    `micro_batch_tokens` stands alone. Where fewer sequences are left, they are rounded up to a multiple of `ROW_STEP` and
    `row_multiple`; only this last micro-batch has padding rows. Batches of equal size thus share few shapes: one full shape for
    each bucket, and a last one that depends on how many full ones came before.

    Args:
        lengths: tokens of each sequence.
        micro_batch_tokens: padded tokens of a micro-batch.
        buckets: allowed padded lengths; a sequence longer than all of them gets a multiple of the largest.
        row_multiple: rows are a multiple of this (devices of the data axes).

    Returns:
        Micro-batches by falling length; the same input gives the same plan.

    Raises:
        ValueError: a size is not positive.
    """
    if micro_batch_tokens < 1 or row_multiple < 1 or not buckets or min(buckets) < 1:
        raise ValueError(f"micro_batch_tokens {micro_batch_tokens}, row_multiple {row_multiple}, buckets {list(buckets)}: must be positive")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    known = sorted(buckets)
    step = math.lcm(ROW_STEP, row_multiple)
    plan = []
    position = 0
    while position < order.size:
        longest = int(sizes[order[position]])
        length = next((bucket for bucket in known if bucket >= longest), -(-longest // known[-1]) * known[-1])
        full = max(micro_batch_tokens // length // row_multiple, 1) * row_multiple
        rows = min(full, -(-(order.size - position) // step) * step)
        plan.append(MicroBatch(order[position : position + rows].tolist(), length, rows))
        position += rows
    return plan
