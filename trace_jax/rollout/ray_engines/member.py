"""One engine of a pool as the trainer sees it: its actor, what it has been asked, and the call that runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError  # pyright: ignore[reportMissingImports]

from trace_jax.rollout.engine import Request
from trace_jax.rollout.ray_engines.actor import Equipped, OtherLife
from trace_jax.rollout.ray_engines.balance import tokens_of


class Lost(Exception):
    """The engine is no more, with all that it had begun. Ray starts it again, unless `for_good`."""

    def __init__(self, reason: str, for_good: bool = False):
        super().__init__(reason)
        self.for_good = for_good


@dataclass(eq=False)
class Member:
    """An engine.

    Args:
      number: its place in the pool.
      actor: handle of its actor.
      life: name of the actor's start that has the weights and was given requests; None until one has been equipped.
      pending: requests not yet returned, by sample.
      fresh: those of them that the engine has not been given.
      call: what runs, `work` or `equip`; None if nothing does.
      since: when that call was made, in seconds of the monotonic clock.
      lost: lives that count as lost, whose requests are fresh again.
    """

    number: int
    actor: Any
    life: str | None = None
    pending: dict[int, Request] = field(default_factory=dict)
    fresh: list[Request] = field(default_factory=list)
    call: Any = None
    since: float = 0.0
    lost: set[str] = field(default_factory=set)

    @property
    def load(self) -> int:
        """Tokens of everything pending, at most."""
        return sum(tokens_of(request) for request in self.pending.values())

    def take(self, requests: Iterable[Request]) -> None:
        """Requests for this engine."""
        requests = list(requests)
        self.pending |= {request.sample_id: request for request in requests}
        self.fresh += requests

    def begin(self, call: Any) -> None:
        """A call that has just been made."""
        self.call, self.since = call, time.monotonic()

    def forget(self) -> None:
        """The engine has been lost: its successor has nothing of what is pending."""
        if self.life is not None:
            self.lost.add(self.life)
        self.life, self.call = None, None
        self.fresh = list(self.pending.values())

    def drop(self, requests: Iterable[Request]) -> None:
        """Requests that are pending no more."""
        samples = {request.sample_id for request in requests}
        self.pending = {sample: request for sample, request in self.pending.items() if sample not in samples}
        self.fresh = [request for request in self.fresh if request.sample_id not in samples]

    def answer(self, call: Any, timeout_s: float) -> Any:
        """What a call returned; waits for it.

        Raises:
          Lost: the engine was lost before or in the call, or does not come back in time.
          Exception: what the engine raised.
        """
        try:
            result = ray.get(call, timeout=timeout_s)
        except GetTimeoutError:
            if self.life is not None:
                self._replace()  # it hangs; if it ever went on, its answers would come beside those of the next one
            raise Lost("it does not answer in time", for_good=self.life is None) from None
        except RayTaskError as error:
            if isinstance(error.cause, OtherLife):
                raise Lost("it was started again") from None
            raise error.cause from error
        except RayError as error:
            # Its process may live: it could not be reached for a while, or its answer was lost on the way. Then its life comes back.
            raise Lost(_reason(error), for_good=isinstance(error, ActorDiedError)) from None
        if isinstance(result, Equipped) and result.life in self.lost:
            self._replace()
            raise Lost("it is there again, with requests that count as lost")
        return result

    def _replace(self) -> None:
        """Ray ends the actor's process and starts another one, up to `max_restarts` times."""
        ray.kill(self.actor, no_restart=False)


def _reason(error: RayError) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Worker exit type" in line or "is unavailable" in line]
    return (telling or lines or [type(error).__name__])[0].split(" Some common causes")[0][:300]
