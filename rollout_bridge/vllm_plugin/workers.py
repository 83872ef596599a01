"""The tensor-parallel workers of one engine, seen from one of them. Imports torch and vllm when it is called."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This worker's place among the tensor-parallel workers, and their number."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def from_first(value: T | None) -> T:
    """What the first worker gives, in every worker; the others give None. A common act of all of them."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(value)


def of_all(value: T) -> list[T]:
    """What each worker gives, in every worker."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    values: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        import torch

        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def send_bytes(data: Tensor) -> None:
    """Fills a uint8 tensor in host memory with what the first worker has in its own."""
    import torch
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    torch.distributed.broadcast(data, src=group.ranks[0], group=group.cpu_group)


def agreed(values: Sequence[T], what: str) -> T:
    """The value of every worker.

    Raises:
      RuntimeError: they differ; `what` says in what.
    """
    if any(value != values[0] for value in values):
        raise RuntimeError(f"the tensor-parallel workers differ in {what}: {', '.join(map(str, values))}; start the engine again")
    return values[0]


def survive_sigterm(_: Any) -> None:
    """Run in a worker's own process: it ends with the process that started it, not with a signal to all processes of a job."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def nothing(_: Any) -> None:
    """Run in every worker: when all have answered, all have done what they were asked before."""
