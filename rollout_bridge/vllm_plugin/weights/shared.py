"""The tensors of an update in every tensor-parallel worker. The first one has received and checked them; the others get each tensor when it
is its turn to be loaded, so they never hold an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.weights.digest import Digest
from rollout_bridge.vllm_plugin.weights.expected import TensorSpec
from rollout_bridge.vllm_plugin.workers import from_first, rank_and_size, send_bytes


class SharedTensors:
    """Names in the same order everywhere; taking a tensor out is a common act of all workers, who must take the same ones.

    Args:
      staged: the first worker's tensors; None in the others.
      expected: name -> type and shape.

    Attributes:
      digest: of what the others were sent; empty in the first worker.
    """

    def __init__(self, staged: dict[str, Tensor] | None, expected: Mapping[str, TensorSpec]):
        self.digest = Digest()
        self._staged = staged
        self._expected = expected
        self._names = dict.fromkeys(from_first(None if staged is None else list(staged)))
        self._alone = rank_and_size()[1] == 1

    def pop(self, name: str) -> Tensor:
        """Takes a tensor out."""
        del self._names[name]
        if self._staged is not None:
            tensor = self._staged.pop(name)
            if not self._alone:
                send_bytes(tensor.reshape(-1).view(torch.uint8))
            return tensor
        spec = self._expected[name]
        data = np.empty(int(np.prod(spec.shape)) * getattr(torch, spec.dtype).itemsize, np.uint8)
        send_bytes(torch.from_numpy(data))
        self.digest.add(name, spec.dtype, spec.shape, data)
        return torch.from_numpy(data).view(getattr(torch, spec.dtype)).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
