"""The reading side of a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rollout_bridge.wire import layout, locks
from rollout_bridge.wire.errors import CorruptSlot, RingClosed, WireError
from rollout_bridge.wire.record import read_record
from rollout_bridge.wire.side import Side
from rollout_bridge.wire.waiting import fence, wait_until


@dataclasses.dataclass(frozen=True)
class Received:
    """A record as it lies in its slot.

    Args:
      number: its number, counted from 0 over the life of the ring.
      arrays: read-only views; they hold this record until it is released and another one soon after. Copy what must stay.
    """

    number: int
    arrays: dict[str, np.ndarray]


class RingReader(Side):
    """Receives records in order. One at a time for a ring; used by one thread. A record is freed when its reader is done with it, so
    after a crash the next reader receives it again.

    Args:
      path: the ring.

    Raises:
      WireError: no ring there, one of another protocol or code version, or it has a reader.
    """

    _role = locks.READER

    @contextmanager
    def receive(self, timeout_s: float) -> Iterator[Received | None]:
        """The next record, checked, for the length of a `with` block; None if none came in time.

        The slot is freed at the end of the block, unless the block raises: then the same record comes again.

        Raises:
          CorruptSlot: it is not what was written; it is dropped and the next call goes on behind it.
          RingClosed: the writer has ended, and all it sent has been received.
          WireError: the writer has died, and all it sent has been received. A new writer may go on.
        """
        number = int(self._released[0])
        if not wait_until(lambda: self._has(number) or self._is_writer_gone(), timeout_s):
            yield None
            return
        if not self._has(number):
            raise self._end()
        fence()
        yield Received(number, self._record(number))
        self._release(number)

    def _has(self, number: int) -> bool:
        return int(self._sent[0]) > number

    def _is_writer_gone(self) -> bool:
        return self._state(locks.WRITER) != layout.NEVER and not self._is_held(locks.WRITER)

    def _end(self) -> WireError:
        if self._state(locks.WRITER) == layout.CLOSED:
            return RingClosed(f"{self.path}: the writer has closed the ring and all its records have been received")
        return WireError(f"{self.path}: the writer has died; restart the worker, see its log for the reason")

    def _record(self, number: int) -> dict[str, np.ndarray]:
        head, data = self._slot(number)
        length = int(head["length"][0])
        try:
            if int(head["number"][0]) != number + 1 or length > self.slot_bytes:
                raise WireError("its slot is damaged")
            record = data[:length]
            record.flags.writeable = False
            return read_record(record, int(head["checksum"][0]))
        except WireError as error:
            self._release(number)
            message = f"{self.path}: record {number} is not what was written: {error}; it is dropped, generate its samples again"
            raise CorruptSlot(message, number) from error

    def _release(self, number: int) -> None:
        fence()
        self._released[0] = number + 1
