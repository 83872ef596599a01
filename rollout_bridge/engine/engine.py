"""The rollout engine of a vLLM worker; implements `trace_jax.rollout.Engine`.

1. A request is pending from `submit` until its answer has been received; the worker knows it by a number of its own.
2. A worker that dies, or says nothing for too long, is replaced: what it sent before counts, the new one gets the weights again and then
   every request that is still pending, under its own seed. So no sample is lost and none comes twice.
3. After `max_restarts` replacements the engine is dead; `health` says why.

Held on the host: the newest weights, for the next worker. Not guaranteed: that a sample which a dead worker had begun gets the same
answer from the next one, if the weights changed in between.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from rollout_bridge.engine.errors import EngineDied, WorkerDied
from rollout_bridge.engine.link import Link
from rollout_bridge.engine.messages import answered, request_message
from rollout_bridge.engine.records import NoRecords, Records
from rollout_bridge.engine.transfer import HeldUpdate
from rollout_bridge.engine.worker import LISTEN_S, Worker
from rollout_bridge.vllm_plugin.serve.channel import Message
from trace_jax.errors import UserError
from trace_jax.rollout.embedded.assemble import without_answers
from trace_jax.rollout.engine import Capabilities, Health, PauseMode, Request, require_room
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import Ack, LayerUpdate
from trace_jax.terminal import say

SUBMIT = 1024
"""Requests in one message."""

T = TypeVar("T")


@dataclass(frozen=True)
class EngineLimits:
    """What an engine allows.

    Args:
      context: tokens of a sequence.
      vocabulary: token ids are below it.
      slot_bytes, silence_s: see `Worker`.
      max_restarts: workers started in place of dead ones, over the engine's life.
    """

    context: int
    vocabulary: int
    slot_bytes: int
    silence_s: float
    max_restarts: int


class VllmEngine:
    """A worker and what it was asked.

    Args:
      connect: starts a worker and returns when its model is loaded.
      limits: what is allowed.
      records: what joins the answers.
      channels: what every worker compensates, site -> channels of each layer; empty if nothing is compensated.

    Attributes:
      resources: closed with the engine.
    """

    def __init__(
        self,
        connect: Callable[[], Link],
        limits: EngineLimits,
        records: Records | None = None,
        channels: Mapping[str, list[list[int]]] | None = None,
    ):
        self.resources = ExitStack()
        self._connect = connect
        self._limits = limits
        self._records = records or NoRecords()
        self._channels = channels
        self._numbers = itertools.count()
        self._pending: dict[int, Request] = {}
        self._finished: list[Trajectories] = []
        self._refused: str | None = None
        self._weights: HeldUpdate | None = None
        self._paused = False
        self._failure: str | None = None
        self._restarts = 0
        self._worker = self._new_worker()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises:
          UserError: a prompt that does not fit the context or the vocabulary; nothing is queued then.
          ValueError: a sample that is pending already.
          RuntimeError: the engine is dead.
        """
        self._require_alive()
        require_room(requests, context=self._limits.context, vocabulary=self._limits.vocabulary)
        known = {request.sample_id for request in self._pending.values()}
        for request in requests:
            if request.sample_id in known:
                raise ValueError(f"sample {request.sample_id} is pending already; wait for its answer or abort it")
            known.add(request.sample_id)
        numbered = {next(self._numbers): request for request in requests}
        self._pending |= numbered
        if self._worker.equipped:
            self._surviving(lambda: self._give(numbered))

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """Finished sequences; waits up to `timeout` seconds for one, and longer where a worker must be replaced.

        Raises:
          UserError: the worker refuses a request.
          RuntimeError: there are requests but no weights yet.
        """
        if self._pending and self._weights is None and not self._finished:
            raise RuntimeError("the engine has no weights yet: call update_weights first")
        try:
            self._listen(time.monotonic() + timeout)
        except EngineDied:
            pass  # what finished before is returned, and `health` tells the rest
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise UserError(refused)
        finished, self._finished = self._finished, []
        return Trajectories.concat(finished)

    def abort(self, sample_ids: Sequence[int]) -> None:
        """Ends pending requests; they come back without an answer at the next poll. Waits for the worker's present step, after which
        nothing of them follows, so that a sample may be submitted again at once."""
        wanted = set(sample_ids)
        numbers = [number for number, request in self._pending.items() if request.sample_id in wanted]
        self._end(numbers)
        if numbers and self._worker.equipped and self._failure is None:
            self._surviving(lambda: self._worker.call("abort", ids=numbers))

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stops generating. With `wait`, returns when the requests that the worker runs have finished."""
        self._require_alive()
        self._paused = True
        if mode == "abort":
            self._end(list(self._pending))
        if self._worker.equipped:
            self._surviving(lambda: self._worker.call("pause", mode=mode))

    def resume(self) -> None:
        """Generates again."""
        self._require_alive()
        self._paused = False
        if self._worker.equipped:
            self._surviving(lambda: self._worker.call("resume"))

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        """Sends new weights; requests that run go on with them. What is refused is sent once more: memory may have been damaged.

        Raises:
          ValueError: the worker refused the update twice; the old weights stay.
          RuntimeError: the engine is dead.
        """
        self._require_alive()
        update = HeldUpdate(updates, version)
        refusals = 0
        while True:
            try:
                ack = self._worker.transfer(update)
                break
            except WorkerDied as error:
                self._replace(error)
            except ValueError as error:
                refusals += 1
                if refusals == 2:
                    self._surviving(self._equip)  # a worker that has just been started does not even have the old ones
                    raise
                say(f"the rollout worker refused new weights: {error}; sending them again")
        self._weights = update
        self._records.weights(update.tensors())
        self._surviving(self._employ)
        return ack

    def capabilities(self) -> Capabilities:
        """The formats that really execute, by the worker's own account.

        Raises:
          RuntimeError: the engine is dead.
        """
        self._require_alive()
        while True:
            try:
                found = self._worker.call("capabilities")["capabilities"]
                formats = {name: found[name] for name in ("weights", "activations", "k", "v", "query", "backend")}
                share = found["residual_fraction"]
                return Capabilities(**formats, record_kinds=self._records.kinds, routes=self._records.routes, residual_fraction=share)
            except WorkerDied as error:
                self._replace(error)
                self._surviving(self._equip)

    def health(self) -> Health:
        """State of the engine, without asking the worker."""
        version = -1 if self._weights is None else self._weights.version
        pending = len(self._pending) + len(self._finished)
        return Health(self._failure is None, self._failure or "ready", pending, self._paused, version)

    def close(self) -> None:
        """Ends the worker and drops weights and requests."""
        self._worker.close()
        self._failure = self._failure or "closed"
        self._pending.clear()
        self._finished, self._weights = [], None
        self.resources.close()

    def _new_worker(self) -> Worker:
        link = self._connect()
        return Worker(link, self._take, self._records.take, self._limits.slot_bytes, self._limits.silence_s)

    @property
    def _expecting(self) -> bool:
        return self._worker.equipped and bool(self._pending) and not self._paused

    def _listen(self, deadline: float) -> None:
        """Takes all messages that have come, and waits for the first answer."""
        while self._failure is None:
            if self._hear(0.0):
                continue
            left = deadline - time.monotonic()
            if self._finished or self._refused or left <= 0 or not self._expecting:
                return
            self._hear(min(left, LISTEN_S))

    def _hear(self, timeout_s: float) -> bool | None:
        return self._surviving(lambda: self._worker.listen(timeout_s, expecting=self._expecting))

    def _take(self, message: Message) -> None:
        """A message of the worker, unless it is about a request that is pending no more."""
        kind = message["type"]
        self._records.take()
        if kind == "finished" and (request := self._pending.pop(message["id"], None)):
            self._finished.append(self._records.attach(request, answered(request, message)))
        elif kind == "aborted":
            self._end([number for number in message["ids"] if number in self._pending])
        elif kind == "refused" and (request := self._pending.pop(message["id"], None)):
            self._refused = f"vLLM refuses the prompt {request.prompt_id}: {message['message']}"

    def _give(self, requests: Mapping[int, Request]) -> None:
        for request in requests.values():
            self._records.expect(request)
        messages = [request_message(number, request) for number, request in requests.items()]
        for start in range(0, len(messages), SUBMIT):
            self._worker.tell({"type": "submit", "requests": messages[start : start + SUBMIT]})

    def _end(self, numbers: Iterable[int]) -> None:
        """Requests that nobody generates any more."""
        ended = [self._pending.pop(number) for number in numbers]
        for request in ended:
            self._records.forget(request)
            self._finished.append(without_answers([request], self.health().version))

    def _surviving(self, act: Callable[[], T]) -> T | None:
        """What the worker does; None if it died, in which case another one has taken over everything."""
        try:
            return act()
        except WorkerDied as error:
            while True:
                self._replace(error)
                try:
                    self._equip()
                    return None
                except WorkerDied as again:
                    error = again

    def _replace(self, error: WorkerDied) -> None:
        """Starts another worker.

        Raises:
          EngineDied: there have been too many, or it does not start.
        """
        self._worker.close()
        if self._restarts == self._limits.max_restarts:
            self._fail(
                f"the rollout worker died: {error}; {self._restarts} of rollout.vllm.max_restarts={self._limits.max_restarts} are used up"
            )
        self._restarts += 1
        say(
            f"the rollout worker died: {error}; starting another ({self._restarts} of {self._limits.max_restarts}), "
            f"{len(self._pending)} requests are generated anew"
        )
        try:
            self._worker = self._new_worker()
        except UserError as failure:
            self._fail(str(failure))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        raise EngineDied(reason)

    def _equip(self) -> None:
        """Gives a new worker the weights and everything pending."""
        if not self._worker.equipped and self._weights is not None:
            self._worker.transfer(self._weights)
            self._employ()

    def _employ(self) -> None:
        """Gives a worker that has its first weights everything pending."""
        if not self._worker.equipped:
            if self._channels:
                self._worker.call("compensate", channels=self._channels)
            self._give(self._pending)
            self._worker.equipped = True
            if not self._paused:
                self._worker.call("resume")

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(self._failure)
