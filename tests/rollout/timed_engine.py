"""An engine that draws one token of every request in each poll, under the weights that it has then; no model, all of the protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from trace_jax.rollout import Ack, Capabilities, FinishReason, Health, LayerUpdate, Request, Trajectories, UpdateDigest
from trace_jax.rollout.engine import PauseMode


def weights(version: int) -> list[LayerUpdate]:
    """A complete set whose tensor says which version it is."""
    return [LayerUpdate(0, {"model.layers.0.weight": np.full(4, version, np.float32)})]


class TimedEngine:
    """Implements `trace_jax.rollout.Engine`.

    Args:
      step_s: seconds of a poll.
      lag: by how much the version that draws is behind the one acknowledged; `lags` times, then never.
      dies_at: poll at which it dies.
      stepwise: a poll waits for a permit.

    Attributes:
      permits: release one for each poll of a stepwise engine.
      blocked: whether a poll waits for one.
      began: the version under which each request was submitted, by sample and attempt.
      threads: that called it, in the order of their first call.
    """

    def __init__(self, step_s: float = 0.0, lag: int = 0, lags: int = 1 << 30, dies_at: int = -1, stepwise: bool = False):
        self.permits = threading.Semaphore(0)
        self.blocked, self._stepwise = False, stepwise
        self._step_s, self._lag, self._lags, self._dies_at = step_s, lag, lags, dies_at
        self._running: dict[int, tuple[Request, list[int]]] = {}
        self._paused, self._alive, self._polls = False, True, 0
        self.version = 0
        self.began: dict[tuple[int, int], int] = {}
        self.threads: list[threading.Thread] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._seen()
        for request in requests:
            assert request.sample_id not in self._running
            self._running[request.sample_id] = request, []
            self.began[request.sample_id, request.attempt] = self.version

    def poll(self, timeout: float = 0.0) -> Trajectories:
        self._seen()
        if self._stepwise:
            self.blocked = not self.permits.acquire(blocking=False)
            if self.blocked:
                self.permits.acquire()
                self.blocked = False
        time.sleep(self._step_s)
        self._polls += 1
        self._alive = self._alive and self._polls != self._dies_at
        if self._paused or not self._alive:
            return Trajectories.empty()
        finished = []
        for sample, (request, versions) in list(self._running.items()):
            behind = self._lag if request.attempt < self._lags else 0
            versions.append(self.version - behind)
            if len(versions) == request.max_new_tokens:
                finished.append(_answer(request, versions))
                del self._running[sample]
        return Trajectories.concat(finished)

    def abort(self, sample_ids: Sequence[int]) -> None:
        raise AssertionError("nobody aborts here")

    def pause(self, mode: PauseMode = "wait") -> None:
        assert mode == "keep"
        self._seen()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        self._seen()
        digest = UpdateDigest()
        received = list(digest.observe(updates))
        assert received[0].tensors["model.layers.0.weight"][0] == version
        self.version = version
        return digest.ack(version)

    def capabilities(self) -> Capabilities:
        return Capabilities("bf16", "bf16", "bf16", "bf16", "bf16", "none", (), False)

    def health(self) -> Health:
        return Health(self._alive, "ready" if self._alive else "out of luck", len(self._running), self._paused, self.version)

    def close(self) -> None:
        self._alive = False

    def _seen(self) -> None:
        if threading.current_thread() not in self.threads:
            self.threads.append(threading.current_thread())


def _answer(request: Request, versions: list[int]) -> Trajectories:
    prompt, answer = request.tokens.size, len(versions)
    return Trajectories(
        offsets=np.asarray([0, prompt + answer], np.int64),
        tokens=np.concatenate([request.tokens, np.ones(answer, np.int32)]),
        sampled=np.arange(prompt + answer) >= prompt,
        logprobs=np.where(np.arange(prompt + answer) >= prompt, np.float32(-1), np.float32(0)),
        weight_version=np.asarray([versions[0]] * prompt + versions, np.int32),
        sample_id=np.asarray([request.sample_id], np.uint64),
        prompt_id=np.asarray([request.prompt_id], np.uint64),
        group=np.asarray([request.group], np.int64),
        attempt=np.asarray([request.attempt], np.uint16),
        temperature=np.ones(1, np.float32),
        finish_reason=np.asarray([FinishReason.LENGTH], np.uint8),
        reward=np.full(1, np.nan, np.float32),
    )
