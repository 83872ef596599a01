"""Writes safetensors files tensor by tensor: the header is known from the plan, so no file is ever held in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Shaped

from rollout_bridge.export.layout import DTYPES, TensorSpec
from trace_jax.models.tensor_files import listed, plan_shards, shard_name, write_index

ALIGNMENT = 8
"""The data of a file begins at a multiple of this, and within it tensors of wide types come first, as readers map them in place."""


class ShardWriter:
    """The tensor files of a directory; a context manager that writes the index and refuses to end incomplete.

    Args:
      directory: existing folder.
      plan: every tensor, in the order in which shards take them; tensors may come in any order.
      max_shard_bytes: limit of one file's tensors; a larger tensor gets a file of its own.
    """

    def __init__(self, directory: Path, plan: Sequence[TensorSpec], max_shard_bytes: int):
        self._directory = directory
        self._missing = {spec.name: spec for spec in plan}
        self._file_of: dict[str, str] = {}
        self._begin: dict[str, int] = {}
        self._open: dict[str, IO[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self.num_bytes = sum(spec.num_bytes for spec in plan)
        shards = plan_shards([(spec.name, (spec.num_bytes,)) for spec in plan], 1, max_shard_bytes)
        self.files = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
        for file, names in zip(self.files, shards, strict=True):
            self._begin_file(file, [self._missing[name] for name in names])

    def _begin_file(self, file: str, specs: list[TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in sorted(specs, key=lambda spec: -DTYPES[spec.dtype].itemsize):
            end = offset + spec.num_bytes
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
            self._file_of[spec.name], self._begin[spec.name] = file, offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        with open(self._directory / file, "xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
        for spec in specs:
            self._begin[spec.name] += 8 + len(text)

    def write(self, name: str, tensor: Shaped[np.ndarray | np.generic, "*shape"]) -> None:
        """Stores one tensor.

        Raises:
          ValueError: it is not in the plan, came before, or has another shape or type than planned.
          OSError: the disk refuses.
        """
        spec = self._missing.pop(name, None)
        if spec is None:
            raise ValueError(f"tensor {name} came twice or is not in the plan")
        array = np.asarray(tensor)
        if array.shape != spec.shape or array.dtype != DTYPES[spec.dtype]:
            raise ValueError(f"tensor {name} is {array.dtype} {array.shape} where {spec.dtype} {spec.shape} was planned")
        stream = self._stream(self._file_of[name])
        stream.seek(self._begin[name])
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def leave_zero(self, name: str) -> None:
        """Leaves a tensor of the plan zero, as a hole in the file that takes no room on the disk."""
        del self._missing[name]

    def _stream(self, file: str) -> IO[bytes]:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open(self._directory / file, "r+b"))
        return self._open[file]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stack.close()
        if kind is not None:
            return
        if self._missing:
            raise ValueError(f"the export is incomplete: {listed(sorted(self._missing))}")
        if len(self.files) > 1:
            write_index(self._directory, self._file_of, self.num_bytes)
