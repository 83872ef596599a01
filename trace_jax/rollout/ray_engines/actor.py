"""One engine in a Ray actor.

1. Ray starts the actor, and starts it again when its process or its host is lost; an engine is made by the first `equip`.
2. Every start has a name, its `life`. Calls name the life they mean, so that none that was meant for a lost engine is taken by its
   successor, which knows nothing of the requests.
3. Calls run one after the other, in the order in which the trainer made them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import ray  # pyright: ignore[reportMissingImports]

from trace_jax.rollout.engine import Capabilities, Engine, PauseMode, Request
from trace_jax.rollout.engine_setup import EngineSetup
from trace_jax.rollout.ray_engines.weights import StoredWeights, stored_layers
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_update import Ack


class OtherLife(Exception):
    """The call was meant for an engine that is no more."""


class EngineEnded(Exception):
    """The engine itself says that it cannot serve any more; the message is its reason."""


@dataclass(frozen=True)
class Equipped:
    """An engine that serves.

    Args:
      life: the name of the actor's start.
      capabilities: what it executes.
      ack: of the weights; None if there were none.
    """

    life: str
    capabilities: Capabilities
    ack: Ack | None


class EngineActor:
    """The engine of a setup.

    Args:
      setup: what the engine is made from.
    """

    def __init__(self, setup: EngineSetup):
        if setup.config.rollout.engine == "vllm":
            jax.config.update("jax_platforms", "cpu")  # the GPU is for vLLM: JAX would take three quarters of its memory
        self._setup = setup
        self._life = uuid.uuid4().hex
        self._made: Engine | None = None

    @ray.method(max_task_retries=-1)
    def equip(self, weights: StoredWeights | None, paused: bool) -> Equipped:
        """Makes the engine if need be, and gives it weights; Ray repeats the call where the actor is lost in it.

        Raises:
          UserError: the engine does not start.
          ValueError: the engine refuses the weights and keeps those it has.
        """
        engine = self._made = self._made or self._setup.single_engine()
        if paused and not engine.health().paused:
            engine.pause("keep")
        ack = None if weights is None else engine.update_weights(stored_layers(weights), weights.version)
        return Equipped(self._life, engine.capabilities(), ack)

    def work(self, life: str, requests: Sequence[Request], timeout: float) -> Trajectories:
        """Takes requests and returns what has finished, after at most `timeout` seconds or one wave.

        Raises:
          UserError: the engine refuses one of the requests; it has taken none of them.
          EngineEnded: the engine is dead.
        """
        engine = self._engine(life)
        if requests:
            engine.submit(requests)
        finished = engine.poll(timeout)
        health = engine.health()
        if not health.alive and not finished.num_sequences:
            raise EngineEnded(health.detail)
        return finished

    def abort(self, life: str, sample_ids: Sequence[int]) -> Trajectories:
        """Ends requests and returns them, with others that have finished; nothing is generated meanwhile."""
        engine = self._engine(life)
        paused = engine.health().paused
        if not paused:
            engine.pause("keep")
        engine.abort(sample_ids)
        finished = engine.poll(0.0)
        if not paused:
            engine.resume()
        return finished

    def pause(self, life: str, mode: PauseMode) -> Trajectories:
        """Pauses the engine and returns what had finished until then."""
        engine = self._engine(life)
        engine.pause(mode)
        return engine.poll(0.0)

    def resume(self, life: str) -> Trajectories:
        """Generates again; returns nothing yet."""
        self._engine(life).resume()
        return Trajectories.empty()

    def close(self) -> None:
        """Closes the engine, whose own processes end with it."""
        if self._made is not None:
            self._made.close()

    def _engine(self, life: str) -> Engine:
        if life != self._life or self._made is None:
            raise OtherLife(life)
        return self._made
