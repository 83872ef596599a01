"""A checksum nearly as fast as memory: 64-bit sums of chunks, and a hash over the sums.

It finds what goes wrong in shared memory: a byte flipped or overwritten, a part that is older than the rest, data shifted or cut
off, chunks exchanged. Reordered words within one chunk keep its sum; it is no protection against somebody who wants to deceive.
"""

import hashlib

import numpy as np

CHUNK = 1 << 20
"""Bytes summed at once: small enough to find the copy still in the cache, large enough for the fast path of memcpy (measured)."""

_WORDS = CHUNK // 8


def checksum(data: np.ndarray) -> int:
    """Checksum of uint8[n]."""
    whole = data.size // CHUNK
    words = data[: whole * CHUNK].view(np.uint64).reshape(whole, _WORDS)
    return _combined([*np.add.reduce(words, axis=1).tolist(), _partial_sum(data[whole * CHUNK :])], data.size)


def copy_with_checksum(source: np.ndarray, target: np.ndarray) -> int:
    """Copies uint8[n] into the aligned uint8[n] `target` and returns its checksum, reading memory once."""
    sums = []
    end = source.size - source.size % CHUNK
    for start in range(0, end, CHUNK):
        piece = target[start : start + CHUNK]
        piece[:] = source[start : start + CHUNK]
        sums.append(int(np.add.reduce(piece.view(np.uint64))))
    target[end:] = source[end:]
    return _combined([*sums, _partial_sum(target[end:])], source.size)


def bytes_checksum(data: bytes) -> int:
    """Checksum of a few bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _partial_sum(data: np.ndarray) -> int:
    whole = data.size - data.size % 8
    return int(np.add.reduce(data[:whole].view(np.uint64))) + int.from_bytes(data[whole:].tobytes(), "little") & 0xFFFFFFFFFFFFFFFF


def _combined(sums: list[int], size: int) -> int:
    return bytes_checksum(np.array([*sums, size], np.uint64).tobytes())
