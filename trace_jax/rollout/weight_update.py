"""Weight updates on their way into an engine: layers of named tensors, and the checksum both ends compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdate:
    """Every tensor of one decoder layer (None: those outside the layers) under its Hugging Face name.

    Codes, block scales and multipliers of quantized weights, and the unquantized weights; NumPy or JAX arrays.
    """

    layer_id: int | None
    tensors: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Ack:
    """What the engine received: number of tensors, checksum over all of them, version now in use."""

    count: int
    checksum: str
    version: int


class UpdateDigest:
    """Running count and checksum of an update, for both ends of a stream of layers.

    The checksum is the sum modulo 2^64 of one 64-bit BLAKE2b hash per tensor over name, dtype, shape and the `row_and_column_sums` of
    its bytes, so it does not depend on the order in which tensors arrive.
    """

    def __init__(self) -> None:
        """Start at zero tensors."""
        self._names: set[str] = set()
        self._sum = 0

    def add(self, update: LayerUpdate) -> None:
        """Take in one layer.

        Raises:
            ValueError: a tensor name was already sent in this update.
        """
        for name, tensor in update.tensors.items():
            if name in self._names:
                raise ValueError(f"tensor {name} was sent twice in one update")
            self._names.add(name)
            array = np.ascontiguousarray(np.asarray(tensor))
            digest = hashlib.blake2b(f"{name}|{array.dtype}|{np.shape(tensor)}|".encode(), digest_size=8)
            digest.update(row_and_column_sums(array.reshape(-1).view(np.uint8)))
            self._sum = (self._sum + int.from_bytes(digest.digest(), "little")) % 2**64

    def observe(self, updates: Iterable[LayerUpdate]) -> Iterator[LayerUpdate]:
        """Pass a stream of layers through, taking in each one."""
        for update in updates:
            self.add(update)
            yield update

    def ack(self, version: int) -> Ack:
        """The acknowledgement of everything taken in so far."""
        return Ack(len(self._names), f"{self._sum:016x}", version)


def row_and_column_sums(data: UInt8[np.ndarray, " n"]) -> bytes:
    """The sums modulo 2^64 over rows and columns of 64-bit words in rows of 8 KiB, then the bytes that fill no row.

    Nothing that changes one word, one row or one column, and no exchange of two words, leaves all of them as they are. Hashing the bytes
    themselves takes ten times as long.
    """
    words = data[: data.size - data.size % 8192].view(np.uint64).reshape(-1, 1024)
    rows, columns = np.empty(len(words), np.uint64), np.zeros(1024, np.uint64)
    for start in range(0, len(words), 32):  # so much at once stays in the cache for the second sum
        part = slice(start, start + 32)
        np.add.reduce(words[part], axis=1, out=rows[part])
        columns += np.add.reduce(words[part], axis=0)
    return rows.tobytes() + columns.tobytes() + data[words.nbytes :].tobytes()
