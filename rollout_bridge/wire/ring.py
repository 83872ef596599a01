"""A ring in shared memory, as its owner has it: made here, opened by one writer and one reader (`side`).

The owner is the process that outlives the others, usually the trainer, which reads. When it closes the ring, its file is gone;
whoever still has it open keeps the memory until they close it. A ring whose processes have all died is deleted by the next
owner that makes one in the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollout_bridge.wire import layout
from rollout_bridge.wire.closing import Closing
from rollout_bridge.wire.code_version import code_checksum
from rollout_bridge.wire.place import default_folders, reserve


class Ring(Closing):
    """The owner's handle.

    Args:
      path: the file that writer and reader open.
    """

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, *, slots: int, slot_bytes: int, folders: Sequence[Path] | None = None) -> Ring:
        """A new, empty ring.

        Args:
          slots: records that may wait for the reader.
          slot_bytes: largest record (`record_bytes`).
          folders: where it may lie, the first with room is taken; None for shared memory, then the folder for temporary files.

        Warns:
          UserWarning: it does not lie in the first folder.

        Raises:
          WireError: no folder has room.
          ValueError: fewer than one slot, or slots that hold nothing.
        """
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a ring of {slots} slots of {slot_bytes} bytes holds nothing; both must be positive")
        path, descriptor = reserve(layout.ring_bytes(slots, slot_bytes), default_folders() if folders is None else folders)
        header = np.zeros(1, layout.HEADER)
        values = {
            "protocol": layout.PROTOCOL,
            "byte_order": layout.BYTE_ORDER,
            "layout": layout.layout_hash(),
            "code": code_checksum(),
            "slots": slots,
            "slot_bytes": slot_bytes,
        }
        for name, value in values.items():
            header[name] = value
        os.pwrite(descriptor, header.tobytes(), 0)
        os.pwrite(descriptor, layout.MAGIC, 0)  # last: from now on it is a ring
        return cls(path, descriptor)

    def close(self) -> None:
        """Deletes the file; may be called twice."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
