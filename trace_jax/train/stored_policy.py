"""A policy that stays on disk: its parameters are read one slice at a time, so a program holds no more of them than it asks for.

A read decodes whole pieces of the stored array. Checkpoints keep stacked layers as a piece per layer; one that was saved before that
holds each array as a single piece, which a read of any layer decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import tensorstore as ts
from jaxtyping import Float

from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, param_shapes
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.train.read_checkpoint import (
    damaged,
    locate_checkpoint,
    policy_from_meta,
    read_meta,
    require_undamaged,
    restore_multipliers,
    tokenizer_of,
)

_ONE_AT_A_TIME = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
"""One piece is read and decoded at a time: every further thread would keep buffers of the size of a piece."""


@runtime_checkable
class ParamSource(Protocol):
    """Parameters that are on disk."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters as float32."""
        ...

    def read(self, path: tuple[str | int, ...], position: tuple[int, ...] = ()) -> Float[np.ndarray, "*shape"]:
        """One float32 parameter, or its slice at a position of the leading axes.

        Args:
          path: keys from the root of the tree.
          position: (index in the stack,), (index in the stack, expert), or () for the whole array.

        Raises:
          UserError: what is on disk is damaged.
        """
        ...


class StoredParams:
    """The parameters of one checkpoint folder, each a float32 array on disk.

    Args:
      folder: a complete checkpoint.
      shapes: the parameter tree with shapes as leaves.

    Raises:
      UserError: a file is not as it was saved, or an array is missing or has another shape or type.
    """

    def __init__(self, folder: Path, shapes: Params):
        require_undamaged(folder, "params")
        self._folder, self._shapes = folder, shapes
        self._context = ts.Context(_ONE_AT_A_TIME)
        self._opened: dict[tuple[str | int, ...], ts.TensorStore] = {}

    def read(self, path: tuple[str | int, ...], position: tuple[int, ...] = ()) -> Float[np.ndarray, "*shape"]:
        """One parameter, or its slice at a position of the leading axes.

        Args:
          path: keys from the root of the tree.
          position: (layer,), (layer, expert), or () for the whole array.
        """
        stored = self._opened.get(path)
        if stored is None:
            stored = self._opened[path] = self._open(path)
        try:
            return np.asarray(stored[position].read().result())
        except ValueError as error:
            raise damaged(self._folder, f"{_dotted(path)} cannot be read") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters as float32."""
        return sum(4 * int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(self._shapes))

    def _open(self, path: tuple[str | int, ...]) -> ts.TensorStore:
        expected: Any = self._shapes
        for key in path:
            expected = expected[key]
        base = (self._folder / "params").absolute().as_uri()
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{_dotted(path)}/"}}
        try:
            stored = ts.open(spec, open=True, read=True, context=self._context).result()
        except ValueError as error:
            raise damaged(self._folder, f"{_dotted(path)} cannot be read") from error
        if (stored.shape, stored.dtype.numpy_dtype) != (expected.shape, np.float32):
            found = f"{stored.dtype.name} {stored.shape}"
            raise damaged(self._folder, f"{_dotted(path)} is {found} instead of float32 {expected.shape}")
        return stored


@dataclass(frozen=True)
class StoredPolicy:
    """A policy read from disk as far as it is small: `LoadedPolicy` without the parameters in memory.

    `has_task` says whether the config in `meta` names the task that the policy was made for.
    """

    folder: Path
    policy: Policy
    params: ParamSource
    multipliers: Multipliers
    tokenizer: str
    meta: dict[str, Any]
    has_task: bool = True


def open_stored_policy(path: Path | str) -> StoredPolicy:
    """Opens the policy of a run directory, a checkpoint directory, or one step of it.

    Raises:
      UserError: there is no complete checkpoint at the path, or it is damaged.
    """
    folder = locate_checkpoint(Path(path))
    meta = read_meta(folder)
    policy = policy_from_meta(meta)
    params = StoredParams(folder, param_shapes(policy.family, policy.config))
    return StoredPolicy(folder, policy, params, restore_multipliers(folder, meta), tokenizer_of(folder, meta), meta)


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(key) for key in path)
