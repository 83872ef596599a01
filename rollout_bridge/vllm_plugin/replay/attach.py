"""Fastens a replayer to the model of a running vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge.vllm_plugin.capture import hooks
from rollout_bridge.vllm_plugin.capture.runner import WrappedForward, check_worker, routers
from rollout_bridge.vllm_plugin.replay.replayer import Replayer
from rollout_bridge.vllm_plugin.workers import rank_and_size
from rollout_bridge.wire import RingClosed, RingReader

RECEIVE_TIMEOUT_S = 60.0
"""How long the trainer may take for the next record."""


def start_replay(llm: Any, ring_path: str | Path) -> None:
    """Replays from the next forward on.

    Args:
      llm: vLLM's `LLM`, as for a capture, with one worker.
      ring_path: a ring that the trainer fills; all of it is read before this returns.

    Raises:
      ValueError: records that cannot be replayed, or engine settings under which rows would be mistaken.
      NotImplementedError: several workers, or routers whose weights depend on experts that were not chosen.
      RuntimeError: a capture or a replay is active.
      TimeoutError: the trainer stopped sending.
    """
    llm.collective_rpc(_attach, args=(Path(ring_path),))


def stop_replay(llm: Any) -> None:
    """The engine rounds and routes by itself again; does nothing if there is no replay."""
    llm.collective_rpc(_detach)


class _Replay:
    """A worker's replay: `worker` is vLLM's."""

    def __init__(self, worker: Any, replayer: Replayer):
        self._routers = routers(worker.model_runner)
        for layer, router in self._routers.items():
            if not getattr(router, "renormalize", False):
                raise NotImplementedError("replay of routes whose weights are not renormalized (norm_topk_prob: false)")
            router._compute_routing = _restricted(layer, router._compute_routing, replayer)
        self._forward = WrappedForward(worker.model_runner, replayer.forward)

    def close(self) -> None:
        """Leaves the engine as it was."""
        self._forward.close()
        for router in self._routers.values():
            del router._compute_routing


_active: _Replay | None = None


def _attach(worker: Any, path: Path) -> None:
    global _active
    check_worker(worker)
    if rank_and_size()[1] > 1:
        raise NotImplementedError("replay with tensor parallelism; use one worker")
    hooks.require_free()
    replayer = Replayer(_records(path))
    _active = _Replay(worker, replayer)
    hooks.install(replayer)


def _detach(worker: Any) -> None:
    global _active
    if _active is not None:
        hooks.install(None)
        _active.close()
    _active = None


def _records(path: Path) -> Iterator[dict[str, np.ndarray]]:
    with RingReader(path) as reader:
        while True:
            try:
                with reader.receive(RECEIVE_TIMEOUT_S) as received:
                    if received is None:
                        raise TimeoutError(f"{path}: no record for {RECEIVE_TIMEOUT_S:g} s; close the ring's writer after the last one")
                    yield received.arrays
            except RingClosed:
                return


def _restricted(layer: int, compute: Any, replayer: Replayer) -> Any:
    def routing(hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(hidden_states, replayer.restrict(layer, router_logits), *args, **kwargs)

    return routing
