"""Shared arrays between two processes: a ring of slots in shared memory, in NumPy and the standard library only.

    with Ring.create(slots=4, slot_bytes=1 << 24) as ring:      # the process that owns the memory
        reader = RingReader(ring.path)
        ...
    with RingWriter(path) as writer:                            # the other process
        writer.send({"tokens": tokens, "codes": codes}, timeout_s=5.0)

`layout` fixes the bytes, docs of each module the rest.
"""

from rollout_bridge.wire.code_version import code_checksum
from rollout_bridge.wire.errors import CorruptSlot, RingClosed, RingFull, WireError
from rollout_bridge.wire.layout import PROTOCOL
from rollout_bridge.wire.reader import Received, RingReader
from rollout_bridge.wire.record import record_bytes
from rollout_bridge.wire.ring import Ring
from rollout_bridge.wire.writer import RingWriter

__all__ = [
    "PROTOCOL",
    "CorruptSlot",
    "Received",
    "Ring",
    "RingClosed",
    "RingFull",
    "RingReader",
    "RingWriter",
    "WireError",
    "code_checksum",
    "record_bytes",
]
