"""The checksum of an update, the same as the trainer's `UpdateDigest`, without its packages."""

import hashlib

import numpy as np


class Digest:
    """Count and checksum of tensors: the sum modulo 2^64 of a 64-bit BLAKE2b hash of each one's name, type, shape and sums."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> None:
        """Takes in a tensor: NumPy's name of its type, and uint8[n] with the bytes of the C-contiguous tensor."""
        digest = hashlib.blake2b(f"{name}|{dtype}|{shape}|".encode(), digest_size=8)
        digest.update(_row_and_column_sums(data))
        self._sum = (self._sum + int.from_bytes(digest.digest(), "little")) % 2**64
        self.count += 1

    @property
    def checksum(self) -> str:
        """Of everything taken in so far."""
        return f"{self._sum:016x}"


def _row_and_column_sums(data: np.ndarray) -> bytes:
    # The trainer's `row_and_column_sums`, which a worker without jax cannot import.
    words = data[: data.size - data.size % 8192].view(np.uint64).reshape(-1, 1024)
    rows, columns = np.empty(len(words), np.uint64), np.zeros(1024, np.uint64)
    for start in range(0, len(words), 32):
        part = slice(start, start + 32)
        np.add.reduce(words[part], axis=1, out=rows[part])
        columns += np.add.reduce(words[part], axis=0)
    return rows.tobytes() + columns.tobytes() + data[words.nbytes :].tobytes()
