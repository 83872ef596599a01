"""What a worker captured of its forward passes joins the answers here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollout_bridge.assembler import Assembler, Layout
from rollout_bridge.wire import CorruptSlot, RingReader, WireError
from trace_jax.models.registry import ModelConfig
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout.audit import Audit
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.engine import Request
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_sync import received_multipliers, static_sites

KINDS = ("scales", "mantissa", "codes")


@runtime_checkable
class Records(Protocol):
    """Routes, guidance records and audits, which travel beside the messages. A worker sends a sample's rows before its answer.

    Attributes:
      kinds: of guidance records that can be made.
      routes: whether answers get routes.
    """

    kinds: tuple[str, ...]
    routes: bool

    def weights(self, tensors: Mapping[str, Any]) -> None:
        """The worker has these weights now."""
        ...

    def expect(self, request: Request) -> None:
        """The sample is generated from now on; what came of it before is dropped."""
        ...

    def take(self) -> None:
        """Takes in all rows that have arrived; called often, so that the worker need not wait for room."""
        ...

    def attach(self, request: Request, answer: Trajectories) -> Trajectories:
        """The answer with its records; those of the sample are then forgotten."""
        ...

    def forget(self, request: Request) -> None:
        """Drops the rows of a sample that was given up."""
        ...


class NoRecords:
    """Nothing is captured."""

    kinds: tuple[str, ...] = ()
    routes = False

    def weights(self, tensors: Mapping[str, Any]) -> None:
        """Nothing."""

    def expect(self, request: Request) -> None:
        """Nothing."""

    def take(self) -> None:
        """Nothing."""

    def attach(self, request: Request, answer: Trajectories) -> Trajectories:
        """The answer as it is."""
        return answer

    def forget(self, request: Request) -> None:
        """Nothing."""


class CapturedRecords:
    """Implements `Records` with the rows of rings.

    Args:
      rings: their paths, one for each tensor-parallel worker; closed with their owner.
      config: of the policy.
      plan: what the rollout rounds.
      capture: kind, sites and layers of the guidance record.
      audit: whether requests may be audited.
    """

    routes = True

    def __init__(self, rings: Sequence[Path], config: ModelConfig, plan: QuantPlan, capture: CaptureSpec, audit: bool):
        self.kinds: tuple[str, ...] = KINDS if capture_layout(config, plan, capture, audit).sites else ()
        self._readers = [RingReader(ring) for ring in rings]
        self._shape = config, plan, capture, audit
        self._assembler: Assembler | None = None
        self._multipliers: dict[str, np.ndarray] = {}
        self._open: dict[int, Request] = {}

    def weights(self, tensors: Mapping[str, Any]) -> None:
        """Multipliers are constant for a run; other ones drop the rows that were made under the old."""
        config, plan, capture, audit = self._shape
        multipliers = received_multipliers(tensors, plan, config.num_layers)
        if self._assembler is not None and all(np.array_equal(multipliers[site], self._multipliers[site]) for site in multipliers):
            return
        self.take()
        self._multipliers = multipliers
        self._assembler = Assembler(Layout.of(config, plan, capture, multipliers, audit=audit))
        for request in self._open.values():
            self._assembler.expect(request.sample_id, request.attempt)

    def expect(self, request: Request) -> None:
        """Opens the sample; rows that a dead worker left in the ring are taken before that, and dropped."""
        self.take()
        self._open[request.sample_id] = request
        self._assembled_by().expect(request.sample_id, request.attempt)

    def take(self) -> None:
        """Empties the rings."""
        if self._assembler is not None:
            for reader in self._readers:
                _empty(reader, self._assembler)

    def attach(self, request: Request, answer: Trajectories) -> Trajectories:
        """The answer with routes, guidance record and audit."""
        del self._open[request.sample_id]
        found = self._assembled_by().finish(request.sample_id, request.attempt, answer.num_tokens)
        audit = None if found.audit is None else Audit(np.zeros(1, np.int64), found.audit)
        return answer.replace(routes=found.routes, guidance=found.guidance, audit=audit)

    def forget(self, request: Request) -> None:
        """Frees the rows of a sample."""
        if self._open.pop(request.sample_id, None) is not None:
            self._assembled_by().forget(request.sample_id)

    def _assembled_by(self) -> Assembler:
        assert self._assembler is not None  # requests go to a worker that has weights
        return self._assembler


def capture_layout(config: ModelConfig, plan: QuantPlan, capture: CaptureSpec, audit: bool) -> Layout:
    """The layout before multipliers are known: for the worker's plan, and the size of its records."""
    ones = {site: np.ones(config.num_layers, np.float32) for site in static_sites(plan)}
    return Layout.of(config, plan, capture, ones, audit=audit)


def _empty(reader: RingReader, assembler: Assembler) -> None:
    while True:
        try:
            with reader.receive(0.0) as received:
                if received is None:
                    return
                assembler.take(received.arrays)
        except CorruptSlot:
            continue  # its rows are missing, which is counted
        except WireError:
            return  # the worker has ended, and all it sent has been taken
