"""One worker from its start to its end: messages, calls that wait for their reply, and weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from rollout_bridge.engine.errors import WorkerDied
from rollout_bridge.engine.link import Link
from rollout_bridge.engine.transfer import HeldUpdate, WeightRing
from rollout_bridge.vllm_plugin.serve.channel import Message
from trace_jax.rollout.weight_update import Ack

LISTEN_S = 0.05
"""Longest wait for one message; the caller has something to do in between."""


class Worker:
    """A worker that has loaded its model.

    Every method raises WorkerDied once it has ended; `take` has then had every message that it sent.

    Args:
      link: how it is reached.
      take: gets its messages, except replies.
      attend: called whenever the worker is listened to.
      slot_bytes: of the weights' ring.
      silence_s: how long it may say nothing while something is expected of it and it is listened to; it is killed then.

    Attributes:
      equipped: set by the caller once the worker has weights and requests.
    """

    def __init__(self, link: Link, take: Callable[[Message], None], attend: Callable[[], None], slot_bytes: int, silence_s: float):
        self.equipped = False
        self._link = link
        self._take = take
        self._attend = attend
        self._slot_bytes = slot_bytes
        self._silence_s = silence_s
        self._silent_s = 0.0
        self._ring: WeightRing | None = None
        self._calls = itertools.count()
        self._replies: dict[int, Message] = {}

    def tell(self, message: Message) -> None:
        """Sends a message that has no reply."""
        with self._hearing_the_last():
            self._link.send(message)

    def call(self, kind: str, **fields: Any) -> Message:
        """Sends a message and waits for its reply.

        Raises:
          ValueError: the worker refuses; nothing has changed there.
        """
        number = next(self._calls)
        self.tell({"type": kind, "call": number, **fields})
        while number not in self._replies:
            self.listen(LISTEN_S, expecting=True)
        reply = self._replies.pop(number)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def listen(self, timeout_s: float, *, expecting: bool) -> bool:
        """Takes the next message, if one comes in time.

        Args:
          expecting: whether a worker that is well would have something to say.

        Returns:
          Whether one came.
        """
        self._attend()
        with self._hearing_the_last():
            message = self._link.receive(timeout_s)
        if message is not None:
            self._silent_s = 0.0
            self._hear(message)
            return True
        self._silent_s = self._silent_s + timeout_s if expecting else 0.0
        if self._silent_s > self._silence_s:
            self._link.kill(
                f"it said nothing for {self._silence_s:g} s and was killed; raise rollout.vllm.silence_timeout_s if it was busy"
            )
        return False

    def transfer(self, update: HeldUpdate) -> Ack:
        """Sends weights.

        Raises:
          ValueError: the worker refused them; it still has what it had.
        """
        update.begin()
        self._ring = ring = self._ring or WeightRing(self._slot_bytes, self._silence_s)
        try:
            with ring.sending(update):
                reply = self.call("update_weights", ring=ring.path, version=update.version)
        except BaseException:
            self._drop_ring()
            raise
        return Ack(reply["count"], reply["checksum"], reply["version"])

    def close(self) -> None:
        """Lets it end, if it has not; may be called twice."""
        self._link.close()
        self._drop_ring()

    @contextlib.contextmanager
    def _hearing_the_last(self):
        """What a worker said before it died counts; only then its death is told."""
        try:
            yield
        except WorkerDied:
            with contextlib.suppress(WorkerDied):
                while (message := self._link.receive(LISTEN_S)) is not None:
                    self._hear(message)
            raise

    def _hear(self, message: Message) -> None:
        if message["type"] == "reply":
            self._replies[message["call"]] = message
        else:
            self._take(message)

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
