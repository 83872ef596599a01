"""A weight update on its way to a worker: the ring it goes through, the thread that sends, and the copy kept for a worker to come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from rollout_bridge.engine.weights import send
from rollout_bridge.wire import Ring, RingReader, RingWriter, WireError
from trace_jax.rollout.weight_update import LayerUpdate

SLOTS = 3


class HeldUpdate:
    """An update that can be sent more than once: what has been sent is held in host memory, the rest comes from the trainer.

    Args:
      updates: consumed as far as it is sent.
      version: of the weights.
    """

    def __init__(self, updates: Iterable[LayerUpdate], version: int):
        self.version = version
        self._held: list[LayerUpdate] = []
        self._rest = iter(updates)

    def begin(self) -> None:
        """Lets the trainer make the first layer, which may take long, before a worker waits for it."""
        next(self.layers(), None)

    def tensors(self) -> dict[str, Any]:
        """Everything that has been sent."""
        return {name: tensor for update in self._held for name, tensor in update.tensors.items()}

    def layers(self) -> Iterator[LayerUpdate]:
        """Every layer from the first on."""
        yield from self._held
        for update in self._rest:
            held = LayerUpdate(update.layer_id, jax.device_get(dict(update.tensors)))
            self._held.append(held)
            yield held


class WeightRing:
    """The ring of one worker.

    Args:
      slot_bytes: of one record; layers are cut to fit.
      timeout_s: how long the worker may take to free a slot.
    """

    def __init__(self, slot_bytes: int, timeout_s: float):
        self._ring = Ring.create(slots=SLOTS, slot_bytes=slot_bytes)
        self._writer = RingWriter(self._ring.path)
        self._timeout_s = timeout_s

    @property
    def path(self) -> str:
        """What the worker opens."""
        return str(self._ring.path)

    @contextlib.contextmanager
    def sending(self, update: HeldUpdate) -> Iterator[None]:
        """Sends in a thread while the block talks to the worker.

        Raises:
          BaseException: what the update itself raised; it goes before what the block raised, which follows from it.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._send, args=(update, errors), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._let_end(thread)
            if errors and not isinstance(errors[0], WireError):
                raise errors[0] from None
            raise
        thread.join()

    def close(self) -> None:
        """Deletes the ring."""
        self._writer.close()
        self._ring.close()

    def _send(self, update: HeldUpdate, errors: list[BaseException]) -> None:
        try:
            send(update.layers(), self._writer, update.version, self._timeout_s)
        except BaseException as error:
            errors.append(error)
            self._writer.close()  # the worker then waits no longer

    def _let_end(self, thread: threading.Thread) -> None:
        """Takes what the thread still sends, in place of a worker that has died or given up."""
        while thread.is_alive():
            thread.join(0.01)
            with contextlib.suppress(WireError), RingReader(self._ring.path) as reader, reader.receive(0.05):
                pass
