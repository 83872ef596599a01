"""The writing side of a ring."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollout_bridge.wire import layout, locks
from rollout_bridge.wire.errors import RingFull
from rollout_bridge.wire.record import write_record
from rollout_bridge.wire.side import Side
from rollout_bridge.wire.waiting import fence, wait_until


class RingWriter(Side):
    """Sends records. One at a time for a ring; used by one thread. After a crash the next writer goes on behind the last whole record.

    Args:
      path: the ring.

    Raises:
      WireError: no ring there, one of another protocol or code version, or it has a writer.
    """

    _role = locks.WRITER

    @property
    def sent(self) -> int:
        """Records sent since the ring was made; the number of the next one."""
        return int(self._sent[0])

    def send(self, arrays: Mapping[str, np.ndarray], timeout_s: float) -> int:
        """Copies named arrays into the next slot, waiting for a free one.

        Args:
          arrays: C-contiguous arrays are copied once, others twice. Names and shapes are free (dtypes: `record.DTYPES`).
          timeout_s: how long the reader may take to free a slot. The reader may be restarted meanwhile.

        Returns:
          The record's number, counted from 0 over the life of the ring.

        Raises:
          RingFull: no slot in time; nothing was sent.
          WireError: the record is too large, or has a dtype that does not travel; nothing was sent.
        """
        number = self.sent
        if not wait_until(lambda: number - int(self._released[0]) < self.slots, timeout_s):
            raise RingFull(f"{self.path}: all {self.slots} slots are full after {timeout_s:g} s: {self._reader_state()}")
        head, data = self._slot(number)
        head["number"][0] = 0
        fence()
        length, checksum = write_record(arrays, data)
        head["length"][0], head["checksum"][0] = length, checksum
        fence()
        head["number"][0] = number + 1
        self._sent[0] = number + 1
        return number

    def wait_until_read(self, timeout_s: float) -> None:
        """Waits until the reader has released all that was sent.

        Raises:
          RingFull: it has not, in time.
        """
        if not wait_until(lambda: int(self._released[0]) == self.sent, timeout_s):
            left = self.sent - int(self._released[0])
            raise RingFull(f"{self.path}: {left} records are unread after {timeout_s:g} s: {self._reader_state()}")

    def _reader_state(self) -> str:
        state = self._state(locks.READER)
        if state == layout.NEVER:
            return "no reader has opened the ring; start the trainer's side"
        if state == layout.CLOSED:
            return "the reader has closed the ring; stop sending"
        if not self._is_held(locks.READER):
            return "the reader has died; restart the trainer's side"
        return "the reader is too slow; use more slots or a longer timeout"
