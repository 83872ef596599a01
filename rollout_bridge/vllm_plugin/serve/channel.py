"""JSON messages over one end of a socket pair, each behind its length as u32, little-endian. Standard library only."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

Message = dict[str, Any]

LIMIT = 1 << 30
"""Bytes of one message; a longer one is not ours."""

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 20


class ChannelClosed(ConnectionError):
    """The other side has ended, and all it sent has been received."""


class Channel:
    """One side; used by one thread.

    It reads while it sends, so two sides that both have much to say cannot block each other.

    Args:
      connection: a connected stream socket.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._ended = False

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Sends a message whole.

        Args:
          timeout_s: how long the other side may take to make room; None waits as long as it lives.

        Raises:
          ChannelClosed: the other side has ended; what it sent before can still be received.
          TimeoutError: there was no room in time. Part of the message may have gone, so the channel is of no use any more.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        left = memoryview(_LENGTH.pack(len(text)) + text)
        deadline = _deadline(timeout_s)
        while left:
            if self._ended:
                raise ChannelClosed("the other side has ended")
            events = self._wait(select.POLLIN | select.POLLOUT, deadline)
            if not events:
                raise TimeoutError(f"the other side made no room for a message of {len(text)} bytes in {timeout_s:g} s")
            if events & ~select.POLLOUT:
                self._read()
            if events & select.POLLOUT:
                try:
                    left = left[self._socket.send(left[:_PIECE]) :]
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError):
                    raise ChannelClosed("the other side has ended") from None

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None if none came in time (None waits as long as the other side lives).

        Raises:
          ChannelClosed: the other side has ended; every message that it sent whole has been received.
          ValueError: what arrives is no message.
        """
        deadline = _deadline(timeout_s)
        while (message := self._next()) is None:
            if self._ended:
                raise ChannelClosed("the other side has ended")
            if not self._wait(select.POLLIN, deadline):
                return None
            self._read()
        return message

    def wait_for_end(self) -> None:
        """Returns when the other side has ended, whatever it has sent; may run in a thread of its own."""
        watched = select.poll()
        watched.register(self._socket, select.POLLRDHUP)
        watched.poll()

    def close(self) -> None:
        """Ends this side; may be called twice."""
        self._socket.close()

    def _wait(self, events: int, deadline: float | None) -> int:
        """What the socket is ready for; 0 if nothing in time."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.poll()
        ready.register(self._socket, events)
        found = ready.poll(None if left is None else left * 1000)
        return found[0][1] if found else 0

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_PIECE)
        except BlockingIOError:
            return
        except ConnectionResetError:
            piece = b""
        self._received += piece
        self._ended = not piece

    def _next(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > LIMIT:
            raise ValueError(f"a message of {length} bytes arrived, which is none of ours; something else writes to the socket")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        text = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return json.loads(text)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
