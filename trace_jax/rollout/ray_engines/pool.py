"""Several engines on Ray as one rollout engine; implements `trace_jax.rollout.Engine`.

1. Requests are divided among the engines by length when they are submitted. `poll` sets every engine to work that does nothing, and does
   not wait for it with a timeout of 0; answers come back through Ray's object store, and their arrays are views of it.
2. Weights are put into the object store once, and every engine reads them there. All of them acknowledge the same bytes, or the update
   has failed.
3. Ray replaces a lost engine, and one that says nothing for `silence_timeout_s`. The new one gets the weights, and then all that was
   pending at the lost one: what had been received counts, so no sample is lost and none comes twice. An engine that Ray gives up ends the
   pool; `health` says why.

Held: the newest weights, in the object store. Not guaranteed: bit-equal log-probabilities after a replacement or with another number of
engines, since the embedded engine compiles other programs for other batch sizes (within 1e-4 in float32); the tokens follow from the
requests' seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports]

from trace_jax.errors import UserError
from trace_jax.rollout.embedded.assemble import without_answers
from trace_jax.rollout.engine import Capabilities, Health, PauseMode, Request, require_room
from trace_jax.rollout.engine_setup import EngineSetup
from trace_jax.rollout.ray_engines.actor import EngineActor, EngineEnded, Equipped
from trace_jax.rollout.ray_engines.balance import shares
from trace_jax.rollout.ray_engines.cluster import cluster, demands
from trace_jax.rollout.ray_engines.member import Lost, Member
from trace_jax.rollout.ray_engines.weights import StoredWeights, store
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import Ack, LayerUpdate
from trace_jax.terminal import say

WORK_S = 0.25
"""How long an engine that has nothing finished works before it looks for new requests, unless it computes waves."""

ENDS_IN_S = 10.0
"""What the engines may take to end once asked to."""


def start_engines(setup: EngineSetup) -> RayEngines:
    """The engines of a run, started and without weights.

    Raises:
      UserError: no cluster, no room for them in it, or an engine that does not start.
    """
    rollout = setup.config.rollout
    with ExitStack() as resources:
        resources.enter_context(cluster(setup.config))
        needs = demands(setup.config)
        remote = ray.remote(EngineActor).options(**needs, max_restarts=rollout.ray.max_restarts)
        channels = {site: np.asarray(ids) for site, ids in setup.channels.items()}  # an actor must not open its device to read them
        members = []
        for number in range(rollout.engines):
            folder = None if setup.directory is None else setup.directory.absolute() / f"engine_{number}"
            members.append(Member(number, remote.remote(replace(setup, directory=folder, channels=channels))))
        pool = RayEngines(setup, members)
        try:
            pool.start(f"each engine asks for {needs['num_cpus']:g} CPUs and {needs['num_gpus']:g} GPUs")
        except BaseException:
            pool.close()
            raise
        pool.resources = resources.pop_all()
        return pool


class RayEngines:
    """A pool of engines.

    Args:
      setup: what they are made from.
      members: their actors, just created.

    Attributes:
      resources: closed with the pool.
    """

    def __init__(self, setup: EngineSetup, members: Sequence[Member]):
        self.resources = ExitStack()
        self._setup = setup
        self._limit, self._silence = setup.config.rollout.ray.start_timeout_s, setup.config.rollout.ray.silence_timeout_s
        self._members = list(members)
        self._capabilities: Capabilities | None = None
        self._weights: StoredWeights | None = None
        self._finished: list[Trajectories] = []
        self._refused: UserError | None = None
        self._paused = False
        self._failure: str | None = None

    def start(self, demand: str) -> None:
        """Waits until every engine is there.

        Args:
          demand: what an engine needs, for the message.

        Raises:
          UserError: one does not start, or not in time.
        """
        limit = self._limit
        calls = [member.actor.equip.remote(None, False) for member in self._members]
        ready, late = ray.wait(calls, num_returns=len(calls), timeout=limit)
        if late:
            there = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise UserError(
                f"{len(ready)} of rollout.engines={len(calls)} engines started within rollout.ray.start_timeout_s={limit:g}; {demand}, "
                f"and the cluster has {there}; start fewer, lower rollout.ray.num_cpus or num_gpus, or raise the time"
            )
        for member, call in zip(self._members, calls, strict=True):
            try:
                self._equipped(member, member.answer(call, limit))
            except Lost as error:
                raise UserError(f"rollout engine {member.number} did not start: {error}; see the logs of the Ray session") from None

    def submit(self, requests: Sequence[Request]) -> None:
        """Divides requests among the engines, which begin at the next poll.

        Raises:
          UserError: a prompt that does not fit the model's context or vocabulary; nothing is queued then.
          ValueError: a sample that is pending already.
          RuntimeError: the pool is dead.
        """
        self._require_alive()
        config = self._setup.policy.config
        require_room(requests, context=config.max_position, vocabulary=config.vocab_size)
        known = {sample for member in self._members for sample in member.pending}
        for request in requests:
            if request.sample_id in known:
                raise ValueError(f"sample {request.sample_id} is pending already; wait for its answer or abort it")
            known.add(request.sample_id)
        for member, share in zip(self._members, shares(requests, [member.load for member in self._members]), strict=True):
            member.take(share)

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """Finished sequences of all engines; waits up to `timeout` seconds for one.

        Raises:
          UserError: an engine refuses a request; everything pending there is aborted.
          RuntimeError: there are requests but no weights yet, or an engine failed in its work.
        """
        if self._weights is None and not self._finished and any(member.pending for member in self._members):
            raise RuntimeError("the engines have no weights yet: call update_weights first")
        deadline = time.monotonic() + timeout
        while self._failure is None:
            self._begin()
            calls = {member.call: member for member in self._members if member.call is not None}
            left = max(0.0, deadline - time.monotonic())
            waits = bool(calls) and not self._finished and self._refused is None
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=left if waits else 0.0) if calls else ([], [])
            for reference in ready:
                self._settle(calls[reference])
            self._require_timely()
            if not ready and (not waits or left == 0):
                break
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        finished, self._finished = self._finished, []
        return Trajectories.concat(finished)

    def abort(self, sample_ids: Sequence[int]) -> None:
        """Ends pending requests; they come back without an answer at the next poll. Waits for the engines' present waves or steps, after
        which nothing of them follows, so that a sample may be submitted again at once."""
        wanted = set(sample_ids)
        concerned = [member for member in self._members if wanted & member.pending.keys()]
        if self._failure is None:
            self._ask(concerned, lambda member: member.actor.abort.remote(member.life, sorted(wanted & member.pending.keys())))
        for member in concerned:
            self._end(member, [request for sample, request in member.pending.items() if sample in wanted])

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stops generating; waits for the engines' present waves or steps, and with `wait` for the requests that they have begun."""
        self._require_alive()
        self._paused = True
        self._ask(self._members, lambda member: member.actor.pause.remote(member.life, mode))
        if mode == "abort":
            for member in self._members:
                self._end(member, list(member.pending.values()))

    def resume(self) -> None:
        """Generates again."""
        self._require_alive()
        self._paused = False
        self._ask(self._members, lambda member: member.actor.resume.remote(member.life))

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        """Gives every engine new weights; requests that run go on with them.

        Raises:
          ValueError: an engine refused the update; the old weights stay, in all of them.
          RuntimeError: the pool is dead, or the engines acknowledge different bytes.
        """
        self._require_alive()
        weights = store(updates, version)
        acks, errors = self._equip_all(weights)
        if errors:
            if self._weights is not None and self._failure is None:
                self._equip_all(self._weights)
            raise errors[0]
        if len(set(acks)) > 1:
            self._failure = f"the rollout engines acknowledge different weights: {', '.join(map(str, acks))}"
            raise RuntimeError(self._failure)
        self._weights = weights
        return acks[0]

    def capabilities(self) -> Capabilities:
        """The formats that really execute, the same in every engine."""
        self._require_alive()
        assert self._capabilities is not None
        return self._capabilities

    def health(self) -> Health:
        """State of the pool, without asking the engines."""
        there = sum(member.life is not None for member in self._members)
        detail = self._failure or f"{there} of {len(self._members)} engines ready"
        pending = sum(len(member.pending) for member in self._members) + sum(part.num_sequences for part in self._finished)
        version = -1 if self._weights is None else self._weights.version
        return Health(self._failure is None, detail, pending, self._paused, version)

    def close(self) -> None:
        """Ends the engines, and the cluster if it was started for them; drops weights and requests."""
        self._failure = self._failure or "closed"
        ends = [member.actor.close.remote() for member in self._members if member.life is not None]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=ENDS_IN_S)
        for member in self._members:
            ray.kill(member.actor)
        self._members, self._finished, self._weights = [], [], None
        self.resources.close()

    def _begin(self) -> None:
        """Lets every engine work that has something to do and does nothing; one that was lost is equipped first."""
        if self._paused or self._weights is None or self._failure is not None:
            return
        for member in self._members:
            if member.call is not None or not member.pending:
                continue
            if member.life is None:
                member.begin(member.actor.equip.remote(self._weights, False))
            else:
                fresh, member.fresh = member.fresh, []
                member.begin(member.actor.work.remote(member.life, fresh, WORK_S))

    def _settle(self, member: Member) -> None:
        """Takes the result of the call that an engine is in; waits for it."""
        if member.call is None:
            return
        call, equips = member.call, member.life is None
        left = member.since + (self._limit if equips else self._silence) - time.monotonic()
        member.call = None
        try:
            result = member.answer(call, max(0.0, left))
        except Lost as error:
            self._lost(member, error, final=equips and error.for_good)
        except UserError as error:
            self._refused = error
            self.abort(list(member.pending))
        except EngineEnded as error:
            self._failure = f"rollout engine {member.number} died: {error}"
        except Exception as error:
            self._failure = f"rollout engine {member.number} failed: {error}"
            raise RuntimeError(self._failure) from error
        else:
            if isinstance(result, Equipped):
                self._equipped(member, result)
            else:
                self._take(member, result)

    def _ask(self, members: Sequence[Member], call: Callable[[Member], Any]) -> None:
        """Calls all engines that have been equipped and takes what they return; one that is lost meanwhile is replaced later."""
        asked = [(member, member.life, call(member)) for member in members if member.life is not None]
        for member, life, reference in asked:
            self._settle(member)  # comes before the answer, since an actor's calls run in their order
            try:
                self._take(member, member.answer(reference, self._silence))
            except Lost as error:
                if member.life == life:
                    self._lost(member, error)

    def _equip_all(self, weights: StoredWeights) -> tuple[list[Ack], list[Exception]]:
        """Gives weights to every engine; the acknowledgements, and what was raised instead."""
        calls = [(member, member.actor.equip.remote(weights, self._paused)) for member in self._members]
        acks: list[Ack] = []
        errors: list[Exception] = []
        for member, call in calls:
            try:
                self._settle(member)
                acks.append(self._acknowledged(member, call, weights))
            except Exception as error:
                errors.append(error)
        return acks, errors

    def _acknowledged(self, member: Member, call: Any, weights: StoredWeights) -> Ack:
        while True:
            try:
                result = member.answer(call, self._limit)
            except Lost as error:
                self._lost(member, error, final=error.for_good)
                self._require_alive()
                call = member.actor.equip.remote(weights, self._paused)
            else:
                self._equipped(member, result)
                return result.ack

    def _equipped(self, member: Member, result: Equipped) -> None:
        """An engine serves; if it is another one than before, nothing that is pending has been given to it."""
        if self._capabilities is None:
            self._capabilities = result.capabilities
        if result.capabilities != self._capabilities:
            self._failure = (
                f"rollout engine {member.number} executes {result.capabilities}, another one {self._capabilities}; run all of them on the "
                "same kind of device"
            )
            raise UserError(self._failure)
        if member.life != result.life:
            if member.life is not None:
                self._lost(member, Lost("its process ended between two calls"))
            member.life = result.life

    def _lost(self, member: Member, error: Lost, *, final: bool = False) -> None:
        """An engine is gone: all that is pending there goes to its successor."""
        member.forget()
        if final:
            restarts = self._setup.config.rollout.ray.max_restarts
            self._failure = (
                f"rollout engine {member.number} is lost for good after rollout.ray.max_restarts={restarts} new starts: {error}; "
                f"{len(member.pending)} of its requests are unfinished"
            )
            return
        say(f"rollout engine {member.number} was lost: {error}; Ray starts it again, {len(member.pending)} requests are generated anew")

    def _take(self, member: Member, finished: Trajectories) -> None:
        """What an engine returned, except what is pending there no more."""
        awaited = [index for index, sample in enumerate(finished.sample_id.tolist()) if sample in member.pending]
        if awaited:
            part = finished.select(awaited)
            member.drop([member.pending[sample] for sample in part.sample_id.tolist()])
            self._finished.append(part)

    def _end(self, member: Member, requests: list[Request]) -> None:
        """Requests that no engine generates any more."""
        member.drop(requests)
        if requests:
            self._finished.append(without_answers(requests, self.health().version))

    def _require_timely(self) -> None:
        """Replaces an engine that hangs, and fails where Ray finds no place for a lost one."""
        for member in self._members:
            late = time.monotonic() - member.since
            if member.call is None or late <= (self._limit if member.life is None else self._silence):
                continue
            if member.life is not None:
                self._settle(member)
            else:
                self._failure = f"rollout engine {member.number} did not come back within rollout.ray.start_timeout_s={self._limit:g}"

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)
