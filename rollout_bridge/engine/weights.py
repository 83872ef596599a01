"""The trainer's side of a weight update: layers of tensors become records of a ring.

The trainer has rounded already, on its device; what travels are codes, scales and multipliers. A layer takes one record, or several
if it does not fit into a slot; a tensor larger than a slot is cut. Held on the host: the tensors of one layer (jax keeps the host's
copy of an array as long as the array lives).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from rollout_bridge.wire import RingWriter
from rollout_bridge.wire.weight_records import HEADER, Piece, RecordHeader, header_array
from trace_jax.rollout.weight_update import Ack, LayerUpdate, UpdateDigest

SMALLEST_SLOT = 4096
"""Bytes that a slot needs at least: a header and a piece worth sending."""

_RECORD_BYTES, _PIECE_BYTES = 256, 320
"""More than a record takes beside its pieces, and a piece beside its data and twice its name."""


def send(updates: Iterable[LayerUpdate], writer: RingWriter, version: int, timeout_s: float = 60.0) -> Ack:
    """Sends a complete update. Blocks until the reader has taken all but the last slots: another thread or process must read.

    Args:
      updates: layers with NumPy or JAX arrays, as `layer_updates` gives them.
      timeout_s: how long the reader may take to free a slot.

    Returns:
      What the engine must acknowledge.

    Raises:
      ValueError: a tensor twice, or slots below `SMALLEST_SLOT`.
      RingFull: the reader did not read in time; the update is broken off, and the reader drops what it has.
    """
    if writer.slot_bytes < SMALLEST_SLOT:
        raise ValueError(f"slots of {writer.slot_bytes} bytes are too small for weights; make the ring with {SMALLEST_SLOT} or more")
    digest = UpdateDigest()
    number = 0
    for update in updates:
        tensors: dict[str, np.ndarray] = jax.device_get(dict(update.tensors))
        digest.add(LayerUpdate(update.layer_id, tensors))
        for pieces, arrays in layer_records(tensors, writer.slot_bytes):
            writer.send({HEADER: header_array(RecordHeader(version, number, pieces)), **arrays}, timeout_s)
            number += 1
    expected = digest.ack(version)
    end = RecordHeader(version, number, {}, (expected.count, expected.checksum))
    writer.send({HEADER: header_array(end)}, timeout_s)
    return expected


def layer_records(tensors: Mapping[str, np.ndarray], slot_bytes: int) -> Iterator[tuple[dict[str, Piece], dict[str, np.ndarray]]]:
    """Cuts tensors into records that fit into a slot, in order.

    Yields:
      what the header says about the pieces, and their bytes.
    """
    pieces: dict[str, Piece] = {}
    arrays: dict[str, np.ndarray] = {}
    room = slot_bytes - _RECORD_BYTES
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        overhead = _PIECE_BYTES + 2 * len(name.encode())
        offset = 0
        while offset < data.size:
            if arrays and room < overhead + min(data.size - offset, SMALLEST_SLOT // 2):
                yield pieces, arrays
                pieces, arrays, room = {}, {}, slot_bytes - _RECORD_BYTES
            part = data[offset : offset + room - overhead]
            pieces[name], arrays[name] = Piece(str(tensor.dtype), np.shape(tensor), offset), part
            room -= overhead + part.size
            offset += part.size
    if arrays:
        yield pieces, arrays
