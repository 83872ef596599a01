"""How the verifier's parent and its worker talk over a pipe: a frame is an 8-byte little-endian length and a pickle."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

HEADER = struct.Struct("<Q")


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return HEADER.pack(len(body)) + body


def read_frame(descriptor: int) -> bytes | None:
    """The next frame's body, None at the end of the stream."""
    header = _read_exactly(descriptor, HEADER.size)
    return None if header is None else _read_exactly(descriptor, HEADER.unpack(header)[0])


def write_frame(descriptor: int, value: Any) -> None:
    """Writes a value as one frame."""
    data = memoryview(frame(pickle.dumps(value)))
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
