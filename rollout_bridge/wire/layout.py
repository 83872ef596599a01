"""The bytes of a ring: one page of header, then equal slots. Little-endian, and every counter has a cache line of its own writer.

    page 0          HEADER: identity, then the writer's line, then the reader's line
    4096 + i * S    slot i: SLOT (64 bytes), then up to `slot_bytes` of record; S is a whole number of cache lines

A record with number n (from 0) lies in slot n % slots. `sent` and `released` count records; they are equal when the ring is
empty and differ by `slots` when it is full. A slot's `number` is n + 1 from the moment it is whole, 0 while it is being written.
"""

import hashlib

import numpy as np

MAGIC = b"TRACEJXR"
PROTOCOL = 2
BYTE_ORDER = 0x01020304
LINE = 64
"""Bytes of a cache line; arrays in a record start on one."""

PAGE = 4096

NEVER, ATTACHED, CLOSED = 0, 1, 2
"""States of a writer or reader. One that is ATTACHED and no longer holds its lock has died."""

_FIELDS = {
    "magic": ("S8", 0),
    "protocol": ("<u4", 8),
    "byte_order": ("<u4", 12),
    "layout": ("<u8", 16),
    "code": ("<u8", 24),
    "slots": ("<u8", 32),
    "slot_bytes": ("<u8", 40),
    "sent": ("<u8", 64),
    "writer": ("<u8", 72),
    "released": ("<u8", 128),
    "reader": ("<u8", 136),
}
_SLOT_FIELDS = {"number": ("<u8", 0), "length": ("<u8", 8), "checksum": ("<u8", 16)}


def _struct(fields: dict[str, tuple[str, int]], itemsize: int) -> np.dtype:
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": list(formats), "offsets": list(offsets), "itemsize": itemsize})


HEADER = _struct(_FIELDS, PAGE)
SLOT = _struct(_SLOT_FIELDS, LINE)


def layout_hash() -> int:
    """64-bit hash of the header's and the slots' fields and of the protocol: two builds with the same value agree on every byte."""
    text = repr((PROTOCOL, _FIELDS, _SLOT_FIELDS, PAGE, LINE))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return LINE + round_up(slot_bytes, LINE)


def ring_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of a whole ring."""
    return PAGE + slots * stride(slot_bytes)


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit
