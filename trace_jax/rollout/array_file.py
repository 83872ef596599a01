"""One file of named arrays: checked on opening, mapped instead of read.

The layout is that of safetensors (8-byte header size, JSON header, raw little-endian arrays), so any safetensors reader
opens it; the header's `__metadata__` adds

    protocol   version of this layout; a reader refuses another one
    meta       JSON of whatever belongs to the arrays
    checksum   BLAKE2b over the header without this entry and over all array bytes

Arrays are ordered by falling item size, which keeps each one aligned without gaps.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.errors import UserError

PROTOCOL = 1


class LostContent(UserError):
    """A file that is gone, truncated or not what was written; what it held must be made again."""


_NAMES = {"bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "uint64": "U64", "float32": "F32"}
_DTYPES = {name: np.dtype(dtype) for dtype, name in _NAMES.items()}
if sys.byteorder != "little":
    raise ImportError("trace_jax stores arrays in little-endian order and runs on little-endian machines only")


def encode_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The file of `arrays` and the JSON-able `meta` as chunks for `trace_jax.files.write_atomic`; arrays are not copied."""
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    contiguous = {name: np.ascontiguousarray(array) for name, array in ordered}
    header: dict[str, Any] = {}
    position = 0
    for name, array in contiguous.items():
        end = position + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    header["__metadata__"] = {"protocol": str(PROTOCOL), "meta": json.dumps(meta)}
    body: list[bytes | memoryview] = [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]
    header["__metadata__"]["checksum"] = _checksum(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *body]


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Map the arrays of a file (read-only) after checking all of it.

    Returns:
        Arrays by name, and `meta`.

    Raises:
        LostContent: no such file, or its content is not what was written.
        UserError: another protocol version, or a file that cannot be read now (permissions, too many open files).
    """
    damaged = LostContent(f"{path} is truncated or damaged; delete it and generate its samples again")
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:  # an empty file cannot be mapped
        raise damaged from error
    except OSError as error:
        kind = LostContent if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"cannot read {path}: {error.strerror}; give a file written by trace-jax that you may read") from error
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise damaged
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        metadata = header["__metadata__"]
        checksum = metadata.pop("checksum")
        protocol = metadata["protocol"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged from error
    # Before the checksum, which another protocol may compute differently: its files are intact, only not for this version.
    if protocol != str(PROTOCOL):
        raise UserError(f"{path} has file protocol {protocol}, this version reads {PROTOCOL}; write it again with this version")
    body = data[8 + size :]
    if checksum != _checksum(header, [body]):
        raise damaged
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            arrays[name] = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], buffer=body, offset=entry["data_offsets"][0])
    return arrays, json.loads(metadata["meta"])


def _checksum(header: Mapping[str, Any], body: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for chunk in body:
        digest.update(chunk)
    return digest.hexdigest()
