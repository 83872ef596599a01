"""The rollout engine's protocol: what every engine, embedded or remote, does for the trainer.

1. The trainer submits `Request`s and polls finished sequences as `Trajectories`, in whatever order they finish.
2. Between two polls it may pause the engine, hand it new weights layer by layer, and resume.
3. The engine acknowledges an update with the number of tensors and a checksum over their bytes; the trainer compares both
   with its own (`UpdateDigest`) before it trusts the version.

Not guaranteed: the order of results, and that a request finishes before an update (its tokens then carry two versions).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Int32

from trace_jax.errors import UserError
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import Ack, LayerUpdate, UpdateDigest

PauseMode: TypeAlias = Literal["wait", "keep", "abort"]
"""wait: finish what runs; keep: freeze it with its KV cache; abort: end it with finish reason ABORTED."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate.

    Attributes:
        sample_id: unique id, returned with the sequence.
        prompt_id: id of the prompt.
        group: sequences whose rewards are compared.
        attempt: 0, or how often the sample was generated before.
        tokens: prompt token ids, int32, at least one.
        max_new_tokens: answers are cut there.
        temperature: 0 takes the most probable token.
        top_p: probability mass kept, 1 keeps all.
        top_k: tokens kept, 0 keeps all.
        seed: the answer depends on it and on nothing else in the batch.
        stop_token_ids: drawing one ends the answer; it is part of the answer.
        audit: also capture full codes at all layers.
    """

    sample_id: int
    prompt_id: int
    group: int
    tokens: Int32[np.ndarray, " P"]
    max_new_tokens: int
    attempt: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    audit: bool = False

    def __post_init__(self) -> None:
        """Normalise `tokens` to int32 and refuse values that no engine can serve."""
        object.__setattr__(self, "tokens", np.asarray(self.tokens, np.int32))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise UserError(f"request {self.sample_id}: the prompt has no tokens; give at least one")
        if self.max_new_tokens < 1:
            raise UserError(f"request {self.sample_id}: max_new_tokens is {self.max_new_tokens}; write 1 or more")
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"request {self.sample_id}: temperature is {self.temperature}; write 0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"request {self.sample_id}: top_p is {self.top_p}; write a number in (0, 1]")
        if self.top_k < 0:
            raise UserError(f"request {self.sample_id}: top_k is {self.top_k}; write 0 (off) or more")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The formats that really execute, not the ones asked for: an engine that fell back to W4A16 says so here.

    Attributes:
        weights: format of the quantized weights in the GEMM.
        activations: format of its activations.
        k: storage format of the keys.
        v: storage format of the values.
        query: format of the query in attention.
        backend: kernel or emulation that executes them, in words.
        record_kinds: guidance kinds the engine can capture.
        routes: whether expert routes are returned.
        residual_fraction: share of the experts' input channels whose rounding error is compensated.
    """

    weights: str
    activations: str
    k: str
    v: str
    query: str
    backend: str
    record_kinds: tuple[str, ...]
    routes: bool
    residual_fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class Health:
    """State of an engine.

    Attributes:
        alive: false once the engine cannot serve any more; `detail` then says why.
        detail: one line.
        pending: requests submitted and not yet returned.
        paused: whether generation is paused.
        version: weight version in use.
    """

    alive: bool
    detail: str
    pending: int
    paused: bool
    version: int


@runtime_checkable
class Engine(Protocol):
    """A rollout engine; the module docstring gives the protocol."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises UserError for a prompt that does not fit the context."""
        ...

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """Sequences that finished since the last poll, as one batch.

        Args:
            timeout: seconds to wait for at least one; 0 returns at once. An engine that computes in the caller's thread
                works on its requests here and may take longer.

        Returns:
            The finished sequences, each exactly once; an empty batch if there is none.
        """
        ...

    def abort(self, sample_ids: Sequence[int]) -> None:
        """End these requests; they come back with finish reason ABORTED. Unknown ids are ignored."""
        ...

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop generating."""
        ...

    def resume(self) -> None:
        """Generate again."""
        ...

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        """Take in new weights; all of them or, on an error, none."""
        ...

    def capabilities(self) -> Capabilities:
        """The formats that really execute."""
        ...

    def health(self) -> Health:
        """State of the engine; never raises."""
        ...

    def close(self) -> None:
        """Release everything; a second call does nothing."""
        ...


def require_room(requests: Sequence[Request], *, context: int, vocabulary: int) -> None:
    """Refuses requests that no engine of a model can serve, before any of them is queued.

    Args:
        requests: to be submitted.
        context: longest sequence, prompt and answer.
        vocabulary: token ids are below it.

    Raises:
        UserError: a prompt and its answer do not fit the context, or a prompt holds a token the model does not have.
    """
    for request in requests:
        if request.tokens.min() < 0 or request.tokens.max() >= vocabulary:
            raise UserError(
                f"prompt {request.prompt_id} holds token ids outside 0..{vocabulary - 1}; use the tokenizer that belongs to the model"
            )
        if request.tokens.size + request.max_new_tokens > context:
            raise UserError(
                f"prompt {request.prompt_id} has {request.tokens.size} tokens; with max_new_tokens={request.max_new_tokens} "
                f"that exceeds the context of {context}; shorten it, or lower rollout.max_new_tokens"
            )


def send_weights(engine: Engine, updates: Iterable[LayerUpdate], version: int) -> Ack:
    """Sends weights and compares the engine's count and checksum with the sender's.

    Args:
        updates: a complete set, consumed once.
        version: of the weights.

    Raises:
        RuntimeError: the engine received something else.
    """
    digest = UpdateDigest()
    ack = engine.update_weights(digest.observe(updates), version)
    if ack != digest.ack(version):
        raise RuntimeError(f"weight sync failed: sent {digest.ack(version)}, the engine acknowledged {ack}")
    return ack


def generate(engine: Engine, requests: Sequence[Request], *, poll_seconds: float = 1.0, stall_seconds: float | None = None) -> Trajectories:
    """Run requests to the end.

    Args:
        engine: must not hold other requests.
        requests: distinct sample ids.
        poll_seconds: waiting time of one poll, after which the engine's health is looked at.
        stall_seconds: give up if nothing finishes for this long; None waits as long as the engine is alive.

    Returns:
        One sequence per request, in the order of the requests.

    Raises:
        RuntimeError: the engine died, or returned a sequence that nobody asked for or that it had returned before.
        TimeoutError: nothing finished within `stall_seconds`; the requests are aborted first.
    """
    samples = [request.sample_id for request in requests]
    waiting = set(samples)
    if len(waiting) != len(samples):
        raise ValueError("sample_id: two requests share one id")
    parts: list[Trajectories] = []
    engine.submit(requests)
    progress = time.monotonic()
    while waiting:
        part = engine.poll(poll_seconds)
        for sample in part.sample_id.tolist():
            if sample not in waiting:
                raise RuntimeError(f"the engine returned sample {sample}, which is not awaited")
            waiting.remove(sample)
        if part.num_sequences:
            parts.append(part)
            progress = time.monotonic()
            continue
        require_serving(engine, unfinished=len(waiting), total=len(requests))
        if stall_seconds is not None and time.monotonic() - progress > stall_seconds:
            engine.abort(sorted(waiting))
            raise TimeoutError(f"no sequence finished for {stall_seconds:g} s; {len(waiting)} of {len(requests)} requests were aborted")
    return in_order(parts, samples)


def require_serving(engine: Engine, *, unfinished: int, total: int) -> None:
    """Refuses to wait for requests that an engine will not finish.

    Raises:
        RuntimeError: the engine is dead or paused.
    """
    health = engine.health()
    if not health.alive:
        raise RuntimeError(f"the engine died with {unfinished} of {total} requests unfinished: {health.detail}")
    if health.paused:
        raise RuntimeError(f"the engine is paused with {unfinished} requests unfinished; call resume() first")


def in_order(parts: Sequence[Trajectories], samples: Sequence[int]) -> Trajectories:
    """Finished sequences as one batch, in the order of these sample ids."""
    place = {sample: index for index, sample in enumerate(samples)}
    batch = Trajectories.concat(parts)
    return batch.select(np.argsort([place[sample] for sample in batch.sample_id.tolist()], kind="stable"))
