"""Safetensors in a Hugging Face directory: one file, or shards with an index; read tensor by tensor, written in order."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trace_jax.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
STORED_DTYPES = {**FLOAT_DTYPES, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
"""Types that can be read, as the files name them."""

NamedShapes = list[tuple[str, tuple[int, ...]]]


class TensorFiles:
    """Read access to every tensor of a directory; a context manager that keeps the files mapped.

    Args:
      directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
      UserError: no safetensors, a missing or damaged file, an index that does not fit its shards, a tensor in two shards.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._starts: dict[str, dict[str, int]] = {}
        try:
            index = self._read_index()
            for file in [SINGLE_FILE] if index is None else sorted(set(index.values())):
                self._open(file)
            if index is not None and index != self._file_of:
                names = sorted(name for name in index.keys() | self._file_of.keys() if index.get(name) != self._file_of.get(name))
                raise UserError(f"{directory}: {INDEX_FILE} and the shards disagree about {listed(names)}; download the checkpoint again")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handles[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Type of a tensor as the file names it, without reading it."""
        return self._handles[self._file_of[name]].get_slice(name).get_dtype()

    def stored(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """One tensor in its stored type, mapped from the file: what is not looked at is not read.

        Raises:
          UserError: the tensor is of a type not in `STORED_DTYPES`.
        """
        file, dtype = self._file_of[name], self.dtype(name)
        if dtype not in STORED_DTYPES:
            raise UserError(
                f"{self.directory / file}: {name} has type {dtype}; take a checkpoint whose weights are of {', '.join(STORED_DTYPES)}"
            )
        # safetensors' own NumPy reader does not know FP8.
        shape = tuple(self._handles[file].get_slice(name).get_shape())
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, STORED_DTYPES[dtype])
        flat = np.memmap(self.directory / file, np.uint8, "r", self._starts[file][name], (count * np.dtype(STORED_DTYPES[dtype]).itemsize,))
        return flat.view(STORED_DTYPES[dtype]).reshape(shape).view(np.ndarray)

    def read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """One tensor as float32, whatever float type the file holds.

        Raises:
          UserError: the tensor is not of type BF16, F16 or F32, or holds NaN or infinity.
        """
        if self.dtype(name) not in FLOAT_DTYPES:
            raise UserError(
                f"{self.directory / self._file_of[name]}: {name} has type {self.dtype(name)} and config.json no quantization_config that "
                "explains it; import the unquantized BF16, F16 or F32 checkpoint"
            )
        return self.require_finite(name, self.stored(name).astype(np.float32))

    def require_finite(self, name: str, values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Returns the values of a tensor.

        Raises:
          UserError: one of them is NaN or infinity.
        """
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.directory / self._file_of.get(name, '')}: {name} holds NaN or infinity; the checkpoint is damaged: take an "
                "earlier one"
            )
        return values

    def _read_index(self) -> dict[str, str] | None:
        """Tensor name -> shard file, or None where a single file holds everything."""
        path, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if not path.exists():
            if single.exists():
                return None
            others = sorted(file.name for pattern in ("*.safetensors", "*.bin") for file in self.directory.glob(pattern))
            found = f" (found {listed(others)})" if others else ""
            raise UserError(
                f"{self.directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}; download the whole safetensors checkpoint"
            )
        if single.exists():
            raise UserError(f"{self.directory} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale")
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path}: weight_map is missing or not a mapping of tensor names to files; download the index again")
        missing = sorted(file for file in set(weight_map.values()) if Path(file).name != file or not (self.directory / file).is_file())
        if missing:
            raise UserError(f"{self.directory} lacks {listed(missing)}, named in {INDEX_FILE}; download the missing shards")
        return weight_map

    def _open(self, file: str) -> None:
        path = self.directory / file
        try:
            handle = self._stack.enter_context(safe_open(path, framework="np"))
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or not a safetensors file ({error}); download it again") from error
        twice = sorted(set(names) & self._file_of.keys())
        if twice:
            raise UserError(f"{path} and {self._file_of[twice[0]]} both hold {listed(twice)}; download the checkpoint again")
        self._handles[file] = handle
        self._starts[file] = _starts(path)
        self._file_of.update(dict.fromkeys(names, file))


def _starts(path: Path) -> dict[str, int]:
    """Name -> first byte of every tensor in a file that is known to be whole."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def write_tensors(
    directory: Path,
    shapes: NamedShapes,
    tensors: Iterable[tuple[str, Float[np.ndarray, "*_"]]],
    dtype: np.dtype,
    max_shard_bytes: int,
    float32: frozenset[str] = frozenset(),
) -> None:
    """Writes tensors to one file, or to shards with an index where they exceed `max_shard_bytes`.

    Args:
      directory: existing folder.
      shapes: names and shapes of all tensors, in the order of `tensors`; the shards are planned from it.
      tensors: names and float32 values; consumed one shard at a time.
      dtype: stored type; float32 is rounded to nearest even.
      max_shard_bytes: limit of one file's tensors; a larger tensor gets a file of its own.
      float32: names of tensors that are stored in float32 all the same.

    Raises:
      UserError: a value is not finite in `dtype`.
      OSError: the file cannot be written.
    """
    types = {name: np.dtype(np.float32) if name in float32 else dtype for name, _ in shapes}
    sizes = {name: math.prod(shape) * types[name].itemsize for name, shape in shapes}
    shards = plan_shards([(name, (size,)) for name, size in sizes.items()], 1, max_shard_bytes)
    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = shard_name(number, len(shards))
        shard = {}
        for expected in names:
            name, values = next(stream)
            if name != expected:
                raise ValueError(f"tensor {name} came where {expected} was planned; give shapes and tensors in one order")
            shard[name] = narrowed(name, values, types[name])
            weight_map[name] = file
        try:
            save_file(shard, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
    if len(shards) > 1:
        write_index(directory, weight_map, sum(sizes.values()))


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """The index of a directory of several shards: the file of each tensor and the size of all."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def plan_shards(shapes: NamedShapes, itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """Cuts an ordered list of tensors into consecutive shards of at most `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes:
        size = int(np.prod(shape, dtype=np.int64)) * itemsize
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is a mapping.

    Raises:
      UserError: the file is missing, no JSON, or not a mapping.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give the directory of a complete Hugging Face checkpoint") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return content


def listed(names: list[str], limit: int = 8) -> str:
    """Names for an error line: all of them, or the first few and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def narrowed(name: str, values: Float[np.ndarray, "*shape"], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """A float32 tensor in its stored type, rounded to nearest even.

    Raises:
      UserError: a value is not finite in `dtype`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.ascontiguousarray(values, dtype=np.float32).astype(dtype)
    if not np.isfinite(narrow).all():
        raise UserError(f"{name} holds NaN, infinity or a value too large for {dtype.name}; take an earlier checkpoint or a wider dtype")
    return narrow
