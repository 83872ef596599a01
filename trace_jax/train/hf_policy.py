"""A policy that stays in a Hugging Face directory: its tensors are read one at a time, under the paths of our tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from jaxtyping import Float

from trace_jax.models.hf import OpenHfCheckpoint, open_hf_directory
from trace_jax.models.hf_tensors import Source
from trace_jax.models.key_map import Entry, TreePath, parameter_shapes
from trace_jax.models.policy import Policy
from trace_jax.models.registry import key_map
from trace_jax.train.import_checkpoint import CARRIED, fitting_tokenizer, untrained_settings
from trace_jax.train.stored_policy import StoredPolicy


class HfParams:
    """The parameters of an open Hugging Face directory; implements `ParamSource`.

    Args:
      files: the open checkpoint.
      entries: of its key map, as the files hold them.
      shapes: of every array of our tree.
    """

    def __init__(self, files: Source, entries: Sequence[Entry], shapes: dict[TreePath, tuple[int, ...]]):
        self._files, self._shapes = files, shapes
        self._entries: dict[TreePath, list[Entry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.path, []).append(entry)
        self._name, self._tensor = "", np.empty(0, np.float32)

    @classmethod
    def of(cls, opened: OpenHfCheckpoint) -> HfParams:
        """Those of a directory, open as long as it is."""
        return cls(opened.files, opened.entries, parameter_shapes(key_map(opened.family, opened.config)))

    def read(self, path: TreePath, position: tuple[int, ...] = ()) -> Float[np.ndarray, "*shape"]:
        """One parameter, or its slice at a position of the leading axes.

        Raises:
          UserError: a tensor is of the wrong type or not finite.
        """
        values = np.empty(self._shapes[path][len(position) :], np.float32)
        for entry in self._entries[path]:
            shared = min(len(position), len(entry.position))
            if entry.position[:shared] == position[:shared]:
                values[entry.position[shared:]] = entry.taken_from(self._read(entry.name))[position[shared:]]
        return values

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters as float32."""
        return sum(4 * int(np.prod(shape, dtype=np.int64)) for shape in self._shapes.values())

    def _read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """A tensor; the last one is kept, because gate and up may be parts of one."""
        if name != self._name:
            self._name, self._tensor = "", np.empty(0, np.float32)  # the old one is let go of first
            self._name, self._tensor = name, self._files.read(name)
        return self._tensor


def open_hf_policy(directory: Path, opened: ExitStack) -> StoredPolicy:
    """Opens a Hugging Face directory as a policy that was never trained or calibrated here.

    Args:
      opened: closes the files.

    Raises:
      UserError: the directory is incomplete or damaged, of a family that is not supported, or no tokenizer fits it.
    """
    found = opened.enter_context(open_hf_directory(directory))
    family, config = found.family, found.config
    tokenizer = fitting_tokenizer(directory, config.vocab_size)
    tokenizer = str(directory.absolute()) if tokenizer == CARRIED else tokenizer
    settings = untrained_settings(family, config, tokenizer)
    meta = {"progress": {"version": 0}, "config": settings.model_dump(mode="json")}
    return StoredPolicy(directory, Policy(family, config), HfParams.of(found), {}, tokenizer, meta, has_task=False)
