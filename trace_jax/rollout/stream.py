"""Batches of verified answers, generated ahead of the trainer by a thread that owns the engine.

1. Batch n is always the same requests, and batches are taken in order: long answers are as likely to be used as short ones, and a
   resumed run needs to know only how many batches were taken.
2. A batch begins when the engine's weights are new enough for the trainer to use them: see `RolloutStream.oldest_allowed`. So generation
   runs ahead as far as the staleness allows and no further, and the trainer waits for a batch that is not complete.
3. New weights wait in one place, where newer ones replace them; the thread gives them to the engine between two polls. Sequences that
   run go on with them, and every token keeps the version that drew it. An engine that computes whole waves in `poll` changes its
   weights between two waves.
4. Groups with tokens older than allowed are generated again, under the same sample ids and the next attempt. An engine that serves what
   it acknowledged never returns any.
5. Answers are verified in a second thread, beside generation and training.

Not guaranteed: which weights draw a token; that depends on time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from trace_jax.rollout.engine import Engine, Request, in_order, require_serving, send_weights
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import LayerUpdate

POLL_S = 0.05
"""Longest wait for an answer; new weights and new batches wait as long."""

MAX_ATTEMPTS = 3
"""How often a group is generated at most because its tokens are too old."""


@dataclass(frozen=True)
class Batch:
    """A batch of the training stream, generated and verified.

    Args:
      scored: its answers, in the order of its requests.
      seconds: that generation took, without the time in which it still worked on the batch before.
      regenerated: answers that were generated again because their tokens were too old.
    """

    scored: Scored
    seconds: float
    regenerated: int = 0


@dataclass
class _Open:
    """A batch under way: its requests and answers by sample."""

    requests: dict[int, Request]
    begun: float
    answers: dict[int, Trajectories] = field(default_factory=dict)
    regenerated: int = 0


class RolloutStream:
    """The batches of a run from the first one that is not trained on yet; one thread uses it.

    Args:
      engine: has weights and no requests; from the first `take` to `close` it belongs to the stream.
      requests: of a batch, by its number.
      score: verifies the answers of a batch.
      first: number of the first batch.
      version: of the engine's weights.
      updates: optimizer updates of a batch.
      max_staleness: updates by which a token may be older than the weights that train on it.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Callable[[int], Sequence[Request]],
        score: Callable[[int, Trajectories], Scored],
        *,
        first: int,
        version: int,
        updates: int,
        max_staleness: int,
    ):
        self._engine, self._requests, self._score = engine, requests, score
        self._updates, self._max_staleness = updates, max_staleness
        self._changed = threading.Condition()  # guards everything below; the thread alone uses what is under way
        self._version = version
        self._taken = self._begun = self._end = first
        self._start_version = version - first * updates
        self._weights: tuple[Sequence[LayerUpdate], int] | None = None
        self._complete: dict[int, Future[Batch]] = {}
        self._held = self._resting = self._closing = False
        self._failure: BaseException | None = None
        self._under_way: dict[int, _Open] = {}
        self._batch_of: dict[int, int] = {}
        self._last_complete = 0.0
        self._thread: threading.Thread | None = None
        self._scoring = ThreadPoolExecutor(1, "score")

    @property
    def version(self) -> int:
        """Of the weights that the engine has."""
        return self._version

    @property
    def waiting(self) -> int:
        """Complete batches that nobody has taken."""
        return len(self._complete)

    def oldest_allowed(self, number: int) -> int:
        """The oldest weights that may draw a token of a batch.

        The trainer's version at the last use of batch n is at most its version now plus the updates of the batches up to and with n,
        less one; a refused update or a step of several batches only makes it smaller.
        """
        return self._start_version + (number + 1) * self._updates - 1 - self._max_staleness

    def take(self, version: int, remaining: int, generated: Callable[[], object] = lambda: None) -> Batch:
        """The next batch; waits for it.

        Args:
          version: of the trainer, which uses the batch in the `updates` that follow.
          remaining: batches that may be needed, with this one; no more are begun.
          generated: called when all answers are there, to take the time.

        Raises:
          UserError: the reward fails on every answer, or a prompt cannot be served.
          RuntimeError: the engine died.
        """
        with self._changed:
            number = self._taken
            self._start_version = version - number * self._updates
            self._end = number + remaining
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
                self._thread.start()
            self._wait(lambda: number in self._complete)
            batch = self._complete.pop(number)
            self._taken += 1
        generated()
        return batch.result()

    def offer(self, updates: Sequence[LayerUpdate], version: int) -> None:
        """Gives the engine new weights as soon as it can take them, at once where it is held; older ones that wait are dropped."""
        with self._changed:
            if self._idle:
                self._update(updates, version)
            else:
                self._weights = updates, version
                self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the length of a block the engine has no requests, the newest weights, and is the caller's; nothing is being verified.

        Waits for the batches under way; those that are complete stay.
        """
        with self._changed:
            self._held = True
            self._wait(lambda: self._idle)
        for batch in self._complete.values():
            batch.exception()
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; what is under way or complete is dropped. The engine is the caller's again; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._scoring.shutdown(cancel_futures=True)

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.notify_all()
        self._changed.wait_for(lambda: condition() or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _turn(self) -> bool:
        """New weights, a new batch and a poll, as far as there is something to do; False at the end."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._weights is not None or bool(self._under_way) or self._may_begin())
            self._resting = False
            if self._closing:
                return False
            weights, self._weights = self._weights, None
        if weights is not None:
            self._engine.pause("keep")
            self._update(*weights)
            self._engine.resume()
        if self._may_begin():
            self._begin()
        if self._under_way:
            self._take_in(self._engine.poll(POLL_S))
        return True

    @property
    def _idle(self) -> bool:
        """Whether the thread leaves the engine alone, and will until it is held no more."""
        resting = self._resting and self._held and not self._under_way and self._weights is None
        return self._thread is None or resting

    def _may_begin(self) -> bool:
        return not self._held and self._begun < self._end and self._version >= self.oldest_allowed(self._begun)

    def _update(self, updates: Sequence[LayerUpdate], version: int) -> None:
        send_weights(self._engine, updates, version)
        self._version = version

    def _begin(self) -> None:
        """Submits one batch: an engine that computes a wave in `poll` then computes one batch at a time."""
        number, requests = self._begun, self._requests(self._begun)
        self._engine.submit(requests)
        self._under_way[number] = _Open({request.sample_id: request for request in requests}, time.monotonic())
        self._batch_of |= dict.fromkeys((request.sample_id for request in requests), number)
        self._begun += 1

    def _take_in(self, part: Trajectories) -> None:
        if not part.num_sequences:
            require_serving(
                self._engine, unfinished=len(self._batch_of), total=sum(len(open.requests) for open in self._under_way.values())
            )
        for index, sample in enumerate(part.sample_id.tolist()):
            if sample not in self._batch_of:
                raise RuntimeError(f"the engine returned sample {sample}, which is not awaited")
            self._under_way[self._batch_of.pop(sample)].answers[sample] = part.sequence(index)
        for number, batch in list(self._under_way.items()):
            if len(batch.answers) == len(batch.requests) and not self._again(number, batch):
                self._finish(number, batch)

    def _again(self, number: int, batch: _Open) -> bool:
        """Submits the groups of a batch that hold too old tokens once more; whether there are any."""
        oldest = self.oldest_allowed(number)
        old = {int(answer.group[0]) for answer in batch.answers.values() if answer.weight_version.min() < oldest}
        again = [replace(request, attempt=request.attempt + 1) for request in batch.requests.values() if request.group in old]
        if not again:
            return False
        if max(request.attempt for request in again) == MAX_ATTEMPTS:
            raise RuntimeError(
                f"the engine acknowledged weights of version {self._version} and returned tokens of versions before {oldest} "
                f"{MAX_ATTEMPTS} times; look for the reason in its log, or raise sync.max_staleness"
            )
        for request in again:
            del batch.answers[request.sample_id]
            batch.requests[request.sample_id] = request
            self._batch_of[request.sample_id] = number
        batch.regenerated += len(again)
        self._engine.submit(again)
        return True

    def _finish(self, number: int, batch: _Open) -> None:
        del self._under_way[number]
        now = time.monotonic()
        seconds, self._last_complete = now - max(batch.begun, self._last_complete), now
        trajectories = in_order(list(batch.answers.values()), list(batch.requests))

        def scored() -> Batch:
            return Batch(self._score(number, trajectories), seconds, batch.regenerated)

        with self._changed:
            self._complete[number] = self._scoring.submit(scored)
            self._changed.notify_all()
