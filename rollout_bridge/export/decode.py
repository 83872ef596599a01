"""Reads an exported directory with NumPy alone: file headers, bytes, and the oracle's decoder. Nothing here is shared with the writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from pallas_kernels import MXFP4, NVFP4, Quantized, oracle

NUMPY_TYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": np.uint8, "U8": np.uint8}
"""E4M3 scales stay bytes, which is what the oracle takes."""


class ExportedFiles:
    """Every tensor of a directory, mapped from disk.

    Args:
      directory: holds `model.safetensors`, or shards and an index.

    Raises:
      ValueError: a tensor lies in two files, or index and files disagree.
    """

    def __init__(self, directory: Path):
        self._tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with open(path, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if name in self._tensors:
                    raise ValueError(f"{name} lies in two files")
                self._tensors[name] = (path, 8 + length, entry)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            found = {name: path.name for name, (path, _, _) in self._tensors.items()}
            if json.loads(index.read_bytes())["weight_map"] != found:
                raise ValueError(f"{index.name} and the files disagree")

    @property
    def declared(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> type and shape as the files state them."""
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, (_, _, entry) in self._tensors.items()}

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """One tensor."""
        path, start, entry = self._tensors[name]
        begin, end = entry["data_offsets"]
        with open(path, "rb") as stream:
            stream.seek(start + begin)
            data = stream.read(end - begin)
        return np.frombuffer(data, NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])

    def decode(self, module: str) -> Float[np.ndarray, "out in"]:
        """The bfloat16 weights of a projection, quantized or not."""
        if f"{module}.weight_packed" in self._tensors:
            codes, scales = self.read(f"{module}.weight_packed"), self.read(f"{module}.weight_scale")
            return oracle.dequantize(Quantized(codes=codes, scales=scales, multiplier=None, size=2 * codes.shape[-1], fmt=MXFP4))
        weight = self.read(f"{module}.weight")
        if weight.dtype != np.uint8:
            return weight
        scales, multiplier = self.read(f"{module}.weight_scale"), self.read(f"{module}.weight_scale_2")
        rows = np.broadcast_to(multiplier, weight.shape[:1])
        return oracle.dequantize(Quantized(codes=weight, scales=scales, multiplier=rows, size=2 * weight.shape[-1], fmt=NVFP4))
