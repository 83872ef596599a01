"""How the engine reaches a worker, whichever process it runs in."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rollout_bridge.vllm_plugin.serve.channel import Message


@runtime_checkable
class Link(Protocol):
    """A worker that has loaded its model.

    Attributes:
      ready: what the worker said of itself.
    """

    ready: Message

    def send(self, message: Message) -> None:
        """Gives the worker a message. Raises WorkerDied if there is no worker any more; what it sent before can still be received."""
        ...

    def receive(self, timeout_s: float) -> Message | None:
        """The worker's next message, None if none came in time. Raises WorkerDied once the worker has ended and has no more to say."""
        ...

    def kill(self, reason: str) -> None:
        """Ends the worker at once; its last messages can still be received, and then a WorkerDied with the reason."""
        ...

    def close(self) -> None:
        """Lets the worker end in order, or else kills it; may be called twice."""
        ...
