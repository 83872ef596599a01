"""A worker without a process: the same server in the trainer's own, for debugging. An error in it is the caller's, with its traceback."""

from __future__ import annotations

import time
from collections import deque

from rollout_bridge.vllm_plugin.serve.channel import Message
from rollout_bridge.vllm_plugin.serve.loop import Build
from rollout_bridge.vllm_plugin.serve.server import Server

NAP_S = 0.01


class InProcessLink:
    """Implements `Link`; the server computes while its messages are awaited.

    Args:
      build: from the `start` message to the generator.
      start: the message.
    """

    def __init__(self, build: Build, start: Message):
        self._said: deque[Message] = deque()
        generator = build(start)
        self._server = Server(generator, self._said.append)
        self.ready: Message = generator.facts()

    def send(self, message: Message) -> None:
        """Does at once what the message asks."""
        self._server.handle(message)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or one step and then perhaps a message."""
        if not self._said and self._server.busy:
            self._server.advance()
        elif not self._said:
            time.sleep(min(timeout_s, NAP_S))
        return self._said.popleft() if self._said else None

    def kill(self, reason: str) -> None:
        """There is no process to kill."""
        raise RuntimeError(reason)

    def close(self) -> None:
        """Releases the generator."""
        if not self._server.closed:
            self._server.handle({"type": "close"})
