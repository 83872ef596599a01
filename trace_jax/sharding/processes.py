"""One run in several processes, on several hosts: how they find each other, and how they agree.

Every process runs the same program over the same config and holds the devices of its host; together they hold the mesh. What they must
agree on goes through `gathered`, which all of them call at the same point. With one process nothing here does anything.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import UInt8

from trace_jax.errors import UserError
from trace_jax.sharding import lost_processes

Value = TypeVar("Value")

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables that name the processes of a run, whatever starts them; Slurm needs none of them."""

KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod of an indexed Job; stands for `JAX_PROCESS_ID`."""

CHUNK_BYTES = 1 << 26
"""What a process sends the others at a time; every device of the run holds that of all processes."""


class Launch(NamedTuple):
    """Where process 0 listens (host:port), how many processes there are, and which one this is."""

    address: str
    count: int
    index: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The processes that an environment describes; None for a run in one process.

    1. An address: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, and `JAX_PROCESS_ID` or, in an indexed Job of Kubernetes (GKE), the
       pod's `JOB_COMPLETION_INDEX`.
    2. Slurm: a step of several tasks (`srun`); the first host of its list is the coordinator.

    Raises:
      UserError: an address without the number of processes or the number of this one, or a number that is none.
    """
    if ADDRESS in environment:
        index = environment.get(INDEX, environment.get(KUBERNETES_INDEX))
        if COUNT not in environment or index is None:
            missing = COUNT if COUNT not in environment else f"{INDEX} (or {KUBERNETES_INDEX})"
            raise UserError(f"{ADDRESS} is set, but {missing} is not; set it, or unset {ADDRESS} to train in one process")
        return _checked(Launch(environment[ADDRESS], _number(COUNT, environment[COUNT]), _number(INDEX, index)))
    nodes, tasks = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if nodes is None or _number("SLURM_STEP_NUM_TASKS", tasks) == 1:
        return None
    # Ports of users begin here; two jobs on one host get different ones.
    port = 61440 + _number("SLURM_JOB_ID", environment["SLURM_JOB_ID"]) % 4096
    return _checked(Launch(f"{_first_host(nodes)}:{port}", int(tasks), _number("SLURM_PROCID", environment["SLURM_PROCID"])))


def join(environment: Mapping[str, str] = os.environ) -> None:
    """Connects this process with the others of its run, if there are any; before anything asks jax for its devices.

    From then on the program ends when another process is lost (`lost_processes`).

    Raises:
      UserError: as `launch_of`, or a process cannot reach process 0.
    """
    launch = launch_of(environment)
    if launch is not None and launch.count > 1:
        jax.distributed.initialize(*launch, cluster_detection_method="deactivate")
        lost_processes.watch(*launch, gathered)


def is_first() -> bool:
    """Whether this is the process that writes; the only one, or number 0. Asking takes no device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gathered(value: Value, chunk_bytes: int = CHUNK_BYTES) -> list[Value]:
    """The values of all processes, in their order. All processes call it at the same point.

    Args:
      value: anything that can be pickled; the processes of a run trust each other.
      chunk_bytes: of a process, sent at a time; a power of two.

    Raises:
      RuntimeError: another process cannot pickle its value.
    """
    if jax.process_count() == 1:
        return [value]
    try:
        data, error = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8), None
    except Exception as caught:  # most likely of memory; the others must not wait
        data, error = np.zeros(0, np.uint8), caught
    sizes = _rows(np.asarray([data.size], np.int64).view(np.uint8)).view(np.int64)[:, 0].tolist()  # JAX knows no int64
    if error is not None:
        raise error
    if 0 in sizes:
        raise RuntimeError(f"process {sizes.index(0)} cannot send what it has; its log says why")
    parts = [np.empty(size, np.uint8) for size in sizes]
    for start in range(0, max(sizes), chunk_bytes):
        here = slice(start, min(start + chunk_bytes, max(sizes)))
        sent = np.zeros(1 << (here.stop - start - 1).bit_length(), np.uint8)  # few lengths, since each is a program
        sent[: data[here].size] = data[here]
        for part, row in zip(parts, _rows(sent), strict=True):
            part[here] = row[: part[here].size]
    return [pickle.loads(part.data) for part in parts]


def _rows(own: UInt8[np.ndarray, " n"]) -> UInt8[np.ndarray, "processes n"]:
    """As many bytes of every process."""
    return np.ascontiguousarray(np.asarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), own.size))


def own_part(count: int) -> slice:
    """Which of `count` things, in order, belong to this process; sizes differ by one at most."""
    processes, index = jax.process_count(), jax.process_index()
    return slice(count * index // processes, count * (index + 1) // processes)


def fail_together(error: Exception | None) -> None:
    """Raises the error of this process, or that of another one, so that none waits for one that has left.

    Raises:
      UserError: some process has one, or an error of its files.
      RuntimeError: some process has another error.
    """
    errors = gathered(None if error is None else (isinstance(error, UserError | OSError), str(error)))
    if error is not None:
        raise error
    for index, found in enumerate(errors):
        if found is not None:
            raise (UserError if found[0] else RuntimeError)(f"process {index}: {found[1]}")


def everywhere(action: Callable[[], Value]) -> Value:
    """Does something in every process; what fails in one fails in all. The action itself waits for no other process.

    Raises:
      UserError, RuntimeError: as `fail_together`.
    """
    try:
        value, error = action(), None
    except Exception as caught:
        value, error = None, caught
    fail_together(error)
    return cast(Value, value)


def on_first(action: Callable[[], Any]) -> None:
    """Does something in the first process only; what fails there fails in all.

    Raises:
      UserError, RuntimeError: as `fail_together`.
    """
    everywhere(lambda: action() if is_first() else None)


def require_agreement(what: str, value: Any) -> None:
    """Refuses to go on if the processes hold different values.

    Raises:
      UserError: they do.
    """
    values = gathered(value)
    different = [index for index, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(
            f"process {different[0]} has {what} {values[different[0]]!r} and process 0 {values[0]!r}; start all processes with the same "
            "config, overrides, files and packages"
        )


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.index < launch.count:
        raise UserError(f"process {launch.index} of {launch.count} cannot be; number the processes from 0 to {launch.count - 1}")
    if ":" not in launch.address:
        raise UserError(f"{ADDRESS} is {launch.address!r}; write host:port, the same for all processes")
    return launch


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise UserError(f"{name} is {text!r}; write a number")
    return int(text)


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list such as `gpu7`, `gpu7,gpu9` or `gpu[007-012,020],cpu1`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",")[0]
    return prefix + rest.replace("]", ",").replace("-", ",").split(",")[0]
