"""Fastens a collector to the model of a running vLLM engine, in every worker of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_bridge.vllm_plugin.capture import hooks
from rollout_bridge.vllm_plugin.capture.collector import Collector, LocalSite
from rollout_bridge.vllm_plugin.capture.plan import CapturePlan
from rollout_bridge.vllm_plugin.capture.runner import WrappedForward, attention_layers, check_worker, expert_blocks, routers
from rollout_bridge.vllm_plugin.workers import rank_and_size
from rollout_bridge.wire import RingWriter

SEND_TIMEOUT_S = 60.0
"""How long the trainer may leave a ring full before the engine gives up."""


def start_capture(llm: Any, ring_path: str | Path | Sequence[str | Path], plan: Mapping[str, Any]) -> None:
    """Captures from the next forward on.

    Args:
      llm: vLLM's `LLM`, started with enforce_eager=True and enable_prefix_caching=False.
      ring_path: the ring that takes the records; one for each tensor-parallel worker if there are several.
      plan: see `CapturePlan.parse`.

    Raises:
      ValueError: a plan or a number of rings that cannot be, or engine settings under which rows would be lost.
      NotImplementedError: an engine that capture does not know.
      RuntimeError: a capture is active.
      WireError: the ring cannot be written.
    """
    paths = [ring_path] if isinstance(ring_path, (str, Path)) else list(ring_path)
    llm.collective_rpc(_attach, args=([Path(path) for path in paths], CapturePlan.parse(plan)))


def stop_capture(llm: Any) -> None:
    """Ends the capture and closes the rings; does nothing if there is none."""
    llm.collective_rpc(_detach)


def set_version(llm: Any, version: int) -> None:
    """Rows of later forwards carry this weight version; 0 until then. Does nothing without a capture."""
    llm.collective_rpc(_set_version, args=(version,))


def heads_part(rank: int, workers: int, heads: int, head_dim: int) -> tuple[int, int] | None:
    """The values of K and V that a tensor-parallel worker sends; None if it only holds copies of another's heads."""
    if heads >= workers:
        share = heads // workers * head_dim
        return rank * share, (rank + 1) * share
    head, copy = divmod(rank, workers // heads)
    return None if copy else (head * head_dim, (head + 1) * head_dim)


class _Capture:
    """A worker's capture: `worker` is vLLM's, `writer` the ring, `plan` what to capture."""

    def __init__(self, worker: Any, writer: RingWriter, plan: CapturePlan):
        runner = worker.model_runner
        self._writer = writer
        self._routers = routers(runner) if plan.routes and rank_and_size()[0] == 0 else {}
        routed = None
        if self._routers:
            routed = tuple(sorted(self._routers)), next(iter(self._routers.values())).global_num_experts
        self.collector = Collector(plan, _local_sites(runner), routed, functools.partial(writer.send, timeout_s=SEND_TIMEOUT_S))
        for layer, router in self._routers.items():
            router.set_capture_fn(functools.partial(self.collector.route, layer))
        self._forward = WrappedForward(runner, self.collector.forward)

    def close(self) -> None:
        """Leaves the engine as it was."""
        self._forward.close()
        for router in self._routers.values():
            router.set_capture_fn(None)
        self._writer.close()


_active: _Capture | None = None


def _attach(worker: Any, paths: list[Path], plan: CapturePlan) -> None:
    global _active
    check_worker(worker)
    rank, size = rank_and_size()
    if len(paths) != size:
        raise ValueError(f"{len(paths)} rings for {size} tensor-parallel workers; give one ring a worker")
    hooks.require_free()
    writer = RingWriter(paths[rank])
    try:
        _active = _Capture(worker, writer, plan)
    except BaseException:
        writer.close()
        raise
    hooks.install(_active.collector)


def _detach(worker: Any) -> None:
    global _active
    if _active is not None:
        hooks.install(None)
        _active.close()
    _active = None


def _set_version(worker: Any, version: int) -> None:
    if _active is not None:
        _active.collector.version = version


def _local_sites(runner: Any) -> dict[str, LocalSite]:
    """The sites that this worker sends."""
    rank, size = rank_and_size()
    blocks, attention = expert_blocks(runner), attention_layers(runner)
    sites = {}
    if blocks and rank == 0:
        sites["expert_input"] = LocalSite(tuple(sorted(blocks)), (0, next(iter(blocks.values())).moe_config.hidden_dim))
    if attention:
        head_dim = next(iter(attention.values())).head_size
        part = heads_part(rank, size, runner.model_config.get_total_num_kv_heads(), head_dim)
        if part is not None:
            sites |= dict.fromkeys(("k", "v"), LocalSite(tuple(sorted(attention)), part))
    return sites
