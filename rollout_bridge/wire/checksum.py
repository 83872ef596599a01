"""A checksum nearly as fast as memory: one sum for every column of the data, and a hash over the sums.

The data are 64-bit words in rows of `ROW` bytes and chunks of 64 rows; what a column holds in a chunk is added modulo 2^64. The sums of
every chunk, and of every column over all chunks, are hashed. A row is no power of two, so that no two cache lines or pages of a chunk fill
the same columns.

For certain it finds what goes wrong in up to `ROW` bytes on end (a flipped bit, a part that is older, data shifted) and two different
words exchanged, unless they lie a whole number of rows apart in one chunk; of everything else it misses as little as a random 64-bit
number would. It is no protection against somebody who wants to deceive.
"""

import hashlib

import numpy as np

ROW = 8192 + 64
"""Bytes of a row."""

_ROWS = 64

CHUNK = _ROWS * ROW
"""Bytes copied and summed at once: the sum finds the copy still in the cache, and calls cost little beside the work (measured)."""


def checksum(data: np.ndarray) -> int:
    """Checksum of uint8[n], aligned to 8 bytes."""
    return _checksum(data, None)


def copy_with_checksum(source: np.ndarray, target: np.ndarray) -> int:
    """Copies uint8[n] into the aligned uint8[n] `target` and returns its checksum, reading memory once."""
    return _checksum(target, source)


def bytes_checksum(data: bytes) -> int:
    """Checksum of a few bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _checksum(data: np.ndarray, source: np.ndarray | None) -> int:
    words = data[: data.size - data.size % ROW].view(np.uint64).reshape(-1, ROW // 8)
    parts = _cut(data, CHUNK)
    columns = np.empty((len(parts), ROW // 8), np.uint64)
    for part, origin, rows, sums in zip(parts, parts if source is None else _cut(source, CHUNK), _cut(words, _ROWS), columns, strict=True):
        if source is not None:
            np.copyto(part, origin)
        np.add.reduce(rows, axis=0, out=sums)
    totals = [np.add.reduce(columns, axis=axis).tobytes() for axis in (0, 1)] if len(words) else []
    return bytes_checksum(b"".join([*totals, data[words.nbytes :].tobytes(), data.size.to_bytes(8, "little")]))


def _cut(array: np.ndarray, length: int) -> list[np.ndarray]:
    """Parts of the first axis: whole ones of `length`, then what is left, which may be nothing."""
    whole = len(array) - len(array) % length
    return [*array[:whole].reshape(-1, length, *array.shape[1:]), array[whole:]]
