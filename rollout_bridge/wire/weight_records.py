"""Records of a weight update: pieces of tensors in their order, then an end marker that says what should have arrived.

A record holds `HEADER`, a `RecordHeader` as JSON, and for every piece uint8[n] under the tensor's name: bytes of the C-contiguous
tensor from the piece's offset on. Records of an update are numbered from 0, so that a reader finds its beginning behind the rest of
an update that was broken off. Types are NumPy names ("bfloat16" among them, which a worker without ml_dtypes reads as well).
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

HEADER = "header"
"""Name of the array that holds the header; names of tensors contain a dot."""


class Piece(NamedTuple):
    """A part of a tensor: the whole tensor's type and shape, and where the part begins in its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class RecordHeader(NamedTuple):
    """What a record says about itself.

    Args:
      version: of the update.
      number: of the record in the update, from 0.
      pieces: tensor name -> its part in this record.
      end: (number of tensors, checksum over them) if the update ends here.
    """

    version: int
    number: int
    pieces: dict[str, Piece]
    end: tuple[int, str] | None = None


def header_array(header: RecordHeader) -> np.ndarray:
    """A header as uint8[n]."""
    return np.frombuffer(json.dumps(header._asdict(), separators=(",", ":")).encode(), np.uint8)


def read_header(arrays: Mapping[str, np.ndarray]) -> RecordHeader:
    """The header of a received record."""
    values = json.loads(arrays[HEADER].tobytes())
    pieces = {name: Piece(dtype, tuple(shape), offset) for name, (dtype, shape, offset) in values["pieces"].items()}
    end = values["end"]
    return RecordHeader(values["version"], values["number"], pieces, None if end is None else (end[0], end[1]))
