"""The checksum of an update, the same as the trainer's `UpdateDigest`, without its packages."""

import hashlib

import numpy as np


class Digest:
    """Count and checksum of tensors: the sum modulo 2^64 of a 64-bit BLAKE2b hash of each one's name, type, shape and bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> None:
        """Takes in a tensor: NumPy's name of its type, and uint8[n] with the bytes of the C-contiguous tensor."""
        digest = hashlib.blake2b(f"{name}|{dtype}|{shape}|".encode(), digest_size=8)
        digest.update(data.data)
        self._sum = (self._sum + int.from_bytes(digest.digest(), "little")) % 2**64
        self.count += 1

    @property
    def checksum(self) -> str:
        """Of everything taken in so far."""
        return f"{self._sum:016x}"
