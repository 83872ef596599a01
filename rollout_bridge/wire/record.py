"""Named arrays as the bytes of one slot: a compact header, then the arrays, each on a cache line.

Header: u32 number of arrays, u32 bytes of the header; per array u8 dtype, u8 axes, u16 bytes of the name, u64 offset, u64 checksum,
u64 per axis, the name in UTF-8. The dtype is the place in `DTYPES`. The header's checksum stands in the slot.
"""

import struct
from collections.abc import Mapping

import numpy as np

from rollout_bridge.wire.checksum import bytes_checksum, checksum, copy_with_checksum
from rollout_bridge.wire.errors import WireError
from rollout_bridge.wire.layout import LINE, round_up

DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
"""What may travel; a position never changes its meaning."""

_COUNT = struct.Struct("<II")
_ARRAY = struct.Struct("<BBHQQ")


def record_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Bytes that a record of these arrays takes in a slot.

    Raises:
      WireError: a dtype that does not travel.
    """
    return _offsets(arrays)[-1]


def write_record(arrays: Mapping[str, np.ndarray], slot: np.ndarray) -> tuple[int, int]:
    """Copies a record into uint8[slot_bytes].

    Returns:
      Its length and its checksum.

    Raises:
      WireError: a dtype that does not travel, or a record longer than the slot; nothing is written then.
    """
    *offsets, length = _offsets(arrays)
    if length > slot.size:
        raise WireError(f"a record of {length} bytes does not fit into slots of {slot.size}; send fewer rows at once or use larger slots")
    entries = []
    for (name, array), offset in zip(arrays.items(), offsets, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        total = copy_with_checksum(flat, slot[offset : offset + flat.size])
        text = name.encode()
        head = _ARRAY.pack(DTYPES.index(array.dtype.str), array.ndim, len(text), offset, total)
        entries.append(head + struct.pack(f"<{array.ndim}Q", *array.shape) + text)
    header = _COUNT.pack(len(entries), _header_bytes(arrays)) + b"".join(entries)
    slot[: len(header)] = np.frombuffer(header, np.uint8)
    return length, bytes_checksum(header)


def read_record(slot: np.ndarray, expected: int) -> dict[str, np.ndarray]:
    """The arrays of a record as views into uint8[length], after checking all of it.

    Args:
      slot: the record, as `write_record` left it.
      expected: the checksum that it returned.

    Raises:
      WireError: the bytes are not what was written; the message says which array.
    """
    if slot.size < _COUNT.size:
        raise WireError("its length is wrong")
    count, size = _COUNT.unpack(slot[: _COUNT.size].tobytes())
    header = slot[:size].tobytes()
    if bytes_checksum(header) != expected:
        raise WireError("its header is damaged")
    arrays: dict[str, np.ndarray] = {}
    position = _COUNT.size
    for _ in range(count):
        code, axes, name_bytes, offset, total = _ARRAY.unpack_from(header, position)
        position += _ARRAY.size
        shape = struct.unpack_from(f"<{axes}Q", header, position)
        position += 8 * axes
        name = header[position : position + name_bytes].decode()
        position += name_bytes
        dtype = np.dtype(DTYPES[code])
        data = slot[offset : offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize]
        if checksum(data) != total:
            raise WireError(f"array {name!r} is damaged")
        arrays[name] = data.view(dtype).reshape(shape)
    return arrays


def _header_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    return _COUNT.size + sum(_ARRAY.size + 8 * array.ndim + len(name.encode()) for name, array in arrays.items())


def _offsets(arrays: Mapping[str, np.ndarray]) -> list[int]:
    """Where each array starts, and the length of the whole."""
    end = _header_bytes(arrays)
    offsets = []
    for name, array in arrays.items():
        if array.dtype.str not in DTYPES:
            raise WireError(f"array {name!r} has dtype {array.dtype}, which does not travel; send its bits as an unsigned integer view")
        offsets.append(round_up(end, LINE))
        end = offsets[-1] + array.nbytes
    return [*offsets, end]
