"""A ring in shared memory: made by its owner, opened by one writer and one reader.

The owner is the process that outlives the others, usually the trainer, which reads. When it closes the ring, its file is gone;
whoever still has it open keeps the memory until they close it. A ring whose processes have all died is deleted by the next
owner that makes one in the same folder.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from rollout_bridge.wire import layout, locks
from rollout_bridge.wire.code_version import code_checksum
from rollout_bridge.wire.errors import WireError
from rollout_bridge.wire.place import default_folders, reserve


class Ring:
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

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Attached:
    """One side's view of a ring: the mapped file, its counters and slots, and the lock of the side's role.

    Args:
      path: the ring.
      role: `locks.WRITER` or `locks.READER`.

    Raises:
      WireError: no ring there, one of another protocol or code version, or the role is taken.
    """

    def __init__(self, path: Path, role: int):
        self.path = path
        self._role = role
        self._descriptor = _open(path)
        try:
            header = _checked_header(path, self._descriptor)
            if not locks.try_lock(self._descriptor, role):
                side = "writer" if role == locks.WRITER else "reader"
                raise WireError(f"{path} has a {side} already; a ring has one, make a ring for each")
        except BaseException:
            os.close(self._descriptor)
            raise
        self.slots, self.slot_bytes = int(header["slots"][0]), int(header["slot_bytes"][0])
        size = layout.ring_bytes(self.slots, self.slot_bytes)
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # Views of single fields: NumPy stores an aligned 64-bit field at once, as a counter that another process polls needs.
        self._counters = np.ndarray(1, layout.HEADER, memory)
        step = layout.stride(self.slot_bytes)
        self._slot_heads = np.ndarray(self.slots, layout.SLOT, memory, layout.PAGE, (step,))
        self._slot_data = np.ndarray((self.slots, self.slot_bytes), np.uint8, memory, layout.PAGE + layout.LINE, (step, 1))
        self.counter("writer" if role == locks.WRITER else "reader")[0] = layout.ATTACHED

    def counter(self, name: str) -> np.ndarray:
        """A field of the header as uint64[1] that reads and writes shared memory."""
        return self._counters[name]

    def slot(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(SLOT[1], uint8[slot_bytes]) of record `number`."""
        index = number % self.slots
        return self._slot_heads[index : index + 1], self._slot_data[index]

    def is_held(self, role: int) -> bool:
        """Whether another process, or another handle in this one, has a role."""
        return locks.is_held(self._descriptor, role)

    def close(self, state: str) -> None:
        """Gives the role back and marks it closed; deletes the file if its owner and the other side are gone. May be called twice.

        Arrays that were handed out stay readable: the memory is unmapped when the last of them is gone.
        """
        if self._descriptor < 0:
            return
        self.counter(state)[0] = layout.CLOSED
        locks.unlock(self._descriptor, self._role)
        if not any(self.is_held(role) for role in (locks.OWNER, locks.WRITER, locks.READER)):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise WireError(f"{path}: cannot be opened ({error.strerror}); the ring's owner has ended or runs as another user") from error


def _checked_header(path: Path, descriptor: int) -> np.ndarray:
    text = os.pread(descriptor, layout.PAGE, 0)
    if len(text) < layout.PAGE or text[: len(layout.MAGIC)] != layout.MAGIC:
        raise WireError(f"{path} is not a ring; give the path that Ring.create returned")
    header = np.frombuffer(text, layout.HEADER)
    if header["byte_order"][0] != layout.BYTE_ORDER:
        raise WireError(f"{path} was made on a machine of another byte order; run both sides on one machine")
    if header["protocol"][0] != layout.PROTOCOL or header["layout"][0] != layout.layout_hash():
        raise WireError(
            f"{path} has wire protocol {header['protocol'][0]} and this process runs {layout.PROTOCOL}, or its layout differs; "
            "install the same trace-jax on both sides"
        )
    if header["code"][0] != code_checksum():
        raise WireError(f"{path} was made by another version of rollout_bridge; write the worker folder again and restart the worker")
    if os.fstat(descriptor).st_size != layout.ring_bytes(int(header["slots"][0]), int(header["slot_bytes"][0])):
        raise WireError(f"{path} is cut off; make the ring again")
    return header
