"""The engines of several processes as one: each generates its part of the requests, and every process gets all answers.

All processes make the same calls with the same arguments. A `poll` runs the own part to its end and exchanges the answers, so that a batch
is complete after one. Its tokens and records are those of a single engine, because the draws of a request follow from its seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trace_jax.rollout.engine import Capabilities, Engine, Health, PauseMode, Request
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import Ack, LayerUpdate
from trace_jax.sharding.processes import everywhere, gathered, own_part, require_agreement

POLL_S = 1.0
"""Longest wait in one poll of the engine of this process."""


class SharedEngine:
    """Implements `trace_jax.rollout.Engine` over the engine of each process.

    Args:
      local: the engine of this process; belongs to the shared one.
    """

    def __init__(self, local: Engine):
        self._local = local
        self._waiting: set[int] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues the own part, which is adjacent requests.

        Raises:
          UserError: a prompt does not fit, in this or another process.
        """
        mine = requests[own_part(len(requests))]
        everywhere(lambda: self._local.submit(mine))
        self._waiting |= {request.sample_id for request in mine}

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """All answers of all processes; without those of a process whose engine is paused.

        Args:
          timeout: of no meaning: a poll lasts until the slowest process has its answers.

        Raises:
          RuntimeError: an engine died.
        """
        return Trajectories.concat(gathered(everywhere(self._own_answers)))

    def _own_answers(self) -> Trajectories:
        """What the own engine makes of its part."""
        parts = []
        while self._waiting:
            parts.append(self._local.poll(POLL_S))
            self._waiting -= set(parts[-1].sample_id.tolist())
            health = self._local.health()
            if not parts[-1].num_sequences and not health.alive:
                raise RuntimeError(f"the engine died with {len(self._waiting)} requests unfinished: {health.detail}")
            if not parts[-1].num_sequences and health.paused:
                break
        return Trajectories.concat(parts)

    def abort(self, sample_ids: Sequence[int]) -> None:
        """Ends requests, wherever they run."""
        self._local.abort(sample_ids)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stops generating in all processes."""
        self._local.pause(mode)

    def resume(self) -> None:
        """Generates again."""
        self._local.resume()

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        """Gives new weights to every engine.

        Raises:
          UserError: the engines did not get the same ones.
          ValueError: they do not fit the engine of this process.
        """

        def update() -> Ack:
            try:
                return self._local.update_weights(updates, version)
            finally:
                for _ in updates:  # on a mesh every layer is brought together by all processes, also by one whose engine takes no more
                    pass

        ack = everywhere(update)
        require_agreement("weights", (ack.count, ack.checksum, ack.version))
        return ack

    def capabilities(self) -> Capabilities:
        """Those of the engine of this process; all have the same settings."""
        return self._local.capabilities()

    def health(self) -> Health:
        """State of the engine of this process."""
        return self._local.health()

    def close(self) -> None:
        """Closes the engine of this process."""
        self._local.close()
