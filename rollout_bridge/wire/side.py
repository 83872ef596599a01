"""A ring as its writer or its reader has it: the mapped file, counters and slots, and the lock of the role."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from rollout_bridge.wire import layout, locks
from rollout_bridge.wire.closing import Closing
from rollout_bridge.wire.code_version import code_checksum
from rollout_bridge.wire.errors import WireError

NAMES = {locks.WRITER: "writer", locks.READER: "reader"}
"""The field of the header in which each role says what it does."""


class Side(Closing):
    """What writer and reader have in common; each says its role.

    Args:
      path: the ring.

    Attributes:
      slots: of the ring.
      slot_bytes: the longest record that fits.

    Raises:
      WireError: no ring there, one of another protocol or code version, or the role is taken.
    """

    _role: ClassVar[int]

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = _open(path)
        try:
            header = _checked_header(path, self._descriptor)
            if not locks.try_lock(self._descriptor, self._role):
                raise WireError(f"{path} has a {NAMES[self._role]} already; a ring has one, make a ring for each")
        except BaseException:
            os.close(self._descriptor)
            raise
        self.slots, self.slot_bytes = int(header["slots"][0]), int(header["slot_bytes"][0])
        size = layout.ring_bytes(self.slots, self.slot_bytes)
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # Views of single fields: NumPy stores an aligned 64-bit field at once, as a counter that another process polls needs.
        counters = np.ndarray(1, layout.HEADER, memory)
        self._sent, self._released = counters["sent"], counters["released"]
        self._states = {role: counters[name] for role, name in NAMES.items()}
        step = layout.stride(self.slot_bytes)
        self._slot_heads = np.ndarray(self.slots, layout.SLOT, memory, layout.PAGE, (step,))
        self._slot_data = np.ndarray((self.slots, self.slot_bytes), np.uint8, memory, layout.PAGE + layout.LINE, (step, 1))
        self._states[self._role][0] = layout.ATTACHED

    def close(self) -> None:
        """Gives the role back and marks it closed; deletes the file if its owner and the other side are gone. May be called twice.

        Arrays that were handed out stay readable: the memory is unmapped when the last of them is gone.
        """
        if self._descriptor < 0:
            return
        self._states[self._role][0] = layout.CLOSED
        locks.unlock(self._descriptor, self._role)
        if not any(self._is_held(role) for role in (locks.OWNER, locks.WRITER, locks.READER)):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _state(self, role: int) -> int:
        return int(self._states[role][0])

    def _slot(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(SLOT[1], uint8[slot_bytes]) of record `number`."""
        index = number % self.slots
        return self._slot_heads[index : index + 1], self._slot_data[index]

    def _is_held(self, role: int) -> bool:
        """Whether another process, or another handle in this one, has a role."""
        return locks.is_held(self._descriptor, role)


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
