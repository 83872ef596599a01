"""The records of a weight update: they fit into their slots, and together they are the tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout_bridge.engine.weights import SMALLEST_SLOT, layer_records, send
from rollout_bridge.wire import Ring, RingReader, RingWriter, record_bytes
from rollout_bridge.wire.weight_records import HEADER, RecordHeader, header_array, read_header
from tests.rollout_bridge.engine.weight_updates import changed, sending, update
from trace_jax.rollout.weight_update import UpdateDigest


@pytest.mark.parametrize("slot_bytes", (SMALLEST_SLOT, 5003, 20_000, 1 << 20))
def test_records_fit_and_hold_every_byte_in_order(slot_bytes: int):
    for layer in update():
        found: dict[str, bytes] = {}
        records = list(layer_records(layer.tensors, slot_bytes))
        for pieces, arrays in records:
            header = header_array(RecordHeader(2**31, 10**9, pieces))
            assert record_bytes({HEADER: header, **arrays}) <= slot_bytes
            assert read_header({HEADER: header}).pieces == pieces and list(pieces) == list(arrays)
            for name, piece in pieces.items():
                tensor = np.asarray(layer.tensors[name])
                assert (piece.dtype, piece.shape, piece.offset) == (str(tensor.dtype), tensor.shape, len(found.get(name, b"")))
                found[name] = found.get(name, b"") + arrays[name].tobytes()
        assert found == {name: np.asarray(tensor).tobytes() for name, tensor in layer.tensors.items()}
        size = sum(len(data) for data in found.values())
        assert len(records) == 1 if slot_bytes == 1 << 20 else len(records) <= 2 * size / slot_bytes + 4


def test_numbers_versions_and_the_end_marker(tmp_path: Path):
    digest = UpdateDigest()
    for layer in update():
        digest.add(layer)
    with (
        Ring.create(slots=2, slot_bytes=8192, folders=[tmp_path]) as ring,
        RingWriter(ring.path) as writer,
        RingReader(ring.path) as reader,
    ):
        headers = []
        with sending(writer, update(), update(seed=1), first_version=7) as expected:
            while sum(header.end is not None for header in headers) < 2:
                with reader.receive(60.0) as received:
                    assert received is not None
                    headers.append(read_header(received.arrays))
    assert expected[0] == digest.ack(7) and expected[1].version == 8 and expected[1].checksum != expected[0].checksum
    first = [header for header in headers if header.version == 7]
    assert [header.number for header in first] == list(range(len(first))) and len(first) > 4
    assert [header.number for header in headers[len(first) :]] == list(range(len(headers) - len(first)))
    assert first[-1].end == (expected[0].count, expected[0].checksum) and not first[-1].pieces
    assert all(header.end is None for header in first[:-1])


def test_what_is_not_sent(tmp_path: Path):
    name = "model.layers.0.input_layernorm.weight"
    twice = [*update(), changed(update(), name, lambda tensor: tensor)[0]]
    with Ring.create(slots=64, slot_bytes=1 << 16, folders=[tmp_path]) as ring, RingWriter(ring.path) as writer:
        with pytest.raises(ValueError, match="was sent twice"):
            send(twice, writer, 0)
    with Ring.create(slots=1, slot_bytes=SMALLEST_SLOT - 1, folders=[tmp_path]) as ring, RingWriter(ring.path) as writer:
        with pytest.raises(ValueError, match="make the ring with 4096 or more"):
            send(update(), writer, 0)
        assert writer.sent == 0
