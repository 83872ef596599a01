"""The endless prompt stream of a split: position -> row, a pure function of (seed, position).

Position p stands in epoch p // n at place p % n; each epoch is one shuffle of the n rows. One integer is thus the whole
data state of a run, and resuming at it continues the uninterrupted sequence.
"""

from __future__ import annotations

import functools
import hashlib


def epoch_and_place(position: int, size: int) -> tuple[int, int]:
    """Epoch and place in it of a stream position.

    Raises:
      ValueError: negative position or empty split.
    """
    if position < 0 or size < 1:
        raise ValueError(f"position {position} of a split with {size} rows; need position >= 0 and at least one row")
    return divmod(position, size)


@functools.lru_cache(maxsize=8)
def epoch_order(prompt_ids: tuple[int, ...], seed: int, epoch: int) -> tuple[int, ...]:
    """Row indices in the order of an epoch: sorted by a keyed hash of (seed, epoch, prompt id).

    A hash sort, unlike a library's shuffle, stays the same across library versions.
    """
    key = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()

    def rank(index: int) -> bytes:
        return hashlib.blake2b(prompt_ids[index].to_bytes(8, "little"), digest_size=16, key=key).digest()

    return tuple(sorted(range(len(prompt_ids)), key=rank))


def stream_indices(prompt_ids: tuple[int, ...], seed: int, start: int, count: int) -> list[int]:
    """Row indices at positions start .. start + count - 1."""
    places = (epoch_and_place(position, len(prompt_ids)) for position in range(start, start + count))
    return [epoch_order(prompt_ids, seed, epoch)[place] for epoch, place in places]
