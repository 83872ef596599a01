"""One update in host memory, checked tensor by tensor as it arrives. Nothing here touches the model."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.weights.digest import Digest
from rollout_bridge.vllm_plugin.weights.expected import TensorSpec
from rollout_bridge.vllm_plugin.weights.seconds import seconds
from rollout_bridge.wire.weight_records import Piece

LARGEST_SCALE = {"nvfp4_scales": 0x7E, "mxfp4_scales": 0xFE}
"""Byte of the largest block scale; above it are NaN and, in E4M3, the negative values, which are no scales."""


class StagedUpdate:
    """Collects the tensors of an update and remembers the first thing that is wrong with it.

    Args:
      expected: name -> what a tensor must be.

    Attributes:
      check_s: what checksum and values took so far, see `seconds`.
    """

    def __init__(self, expected: Mapping[str, TensorSpec]):
        self._expected = expected
        self._buffers: dict[str, np.ndarray] = {}
        self._filled: dict[str, int] = {}
        self._digest = Digest()
        self.tensors: dict[str, Tensor] = {}
        self.problem: str | None = None
        self.check_s = np.zeros(2)

    def refuse(self, problem: str) -> None:
        """Something is wrong; the first reason stays, and what has been collected is let go."""
        self.problem = self.problem or problem
        self.tensors.clear()
        self._buffers.clear()

    def take(self, name: str, piece: Piece, data: np.ndarray) -> None:
        """Copies a piece, uint8[n]. Refuses a tensor that is unknown, misshapen, of another type, repeated, or has bad values."""
        if self.problem:
            return
        spec = self._expected.get(name)
        if spec is None:
            return self.refuse(f"{name} is not a tensor that this engine takes; start it with the configuration of the trainer")
        if name in self.tensors:
            return self.refuse(f"{name} was sent twice")
        if piece.dtype != spec.dtype or piece.shape != spec.shape:
            return self.refuse(f"{name} is {piece.dtype} {piece.shape} and the engine takes {spec.dtype} {spec.shape}")
        if name not in self._buffers:
            self._buffers[name] = np.empty(int(np.prod(spec.shape)) * getattr(torch, spec.dtype).itemsize, np.uint8)
            self._filled[name] = 0
        buffer, start = self._buffers[name], self._filled[name]
        if piece.offset != start or start + data.size > buffer.size:
            return self.refuse(f"{name} has a piece at byte {piece.offset} where byte {start} was next")
        buffer[start : start + data.size] = data
        self._filled[name] = start + data.size
        if self._filled[name] == buffer.size:
            self._complete(name, spec, self._buffers.pop(name))

    def _complete(self, name: str, spec: TensorSpec, buffer: np.ndarray) -> None:
        start = seconds()
        self._digest.add(name, spec.dtype, spec.shape, buffer)
        tensor = torch.from_numpy(buffer).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        problem = bad_values(tensor, spec)
        self.check_s += seconds() - start
        if problem:
            return self.refuse(f"{name} {problem}")
        self.tensors[name] = tensor

    def finish(self, count: int, checksum: str) -> None:
        """Compares what came with what should have, by the list of the model and by the sender's count and checksum."""
        missing = [name for name, spec in self._expected.items() if spec.required and name not in self.tensors]
        if missing:
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            self.refuse(f"{missing[0]} is missing{others}")
        for name in [name for name in self.tensors if name.endswith("gate_proj.weight_scale_2")]:
            up = name.replace("gate_proj", "up_proj")
            if not self.problem and not torch.equal(self.tensors[name], self.tensors[up]):
                self.refuse(f"{up} differs from {name}, and the engine has one for both")
        if not self.problem and (self.count, self.checksum) != (count, checksum):
            self.refuse(f"{self.count} tensors with checksum {self.checksum} arrived where {count} with {checksum} were sent")

    @property
    def count(self) -> int:
        """Whole tensors so far."""
        return self._digest.count

    @property
    def checksum(self) -> str:
        """Checksum of the whole tensors so far, the trainer's `UpdateDigest`."""
        return self._digest.checksum


def bad_values(tensor: Tensor, spec: TensorSpec) -> str | None:
    """What is wrong with the values of a tensor of the given kind; None if nothing is."""
    if spec.kind in LARGEST_SCALE:
        return "holds a block scale that is negative or NaN" if int(tensor.max()) > LARGEST_SCALE[spec.kind] else None
    if spec.kind == "codes":
        return None
    lowest, highest = tensor.aminmax()  # one pass; both are NaN where one value is
    if not bool(lowest.isfinite() & highest.isfinite()):
        return "holds NaN or infinity"
    if spec.kind != "float" and float(lowest) <= 0:
        return "is not positive"
    if spec.kind == "kv_scale" and tensor.to(torch.bfloat16) != tensor:
        return f"is {float(tensor)}, which bfloat16 cannot hold; use a power of two"
    return None
