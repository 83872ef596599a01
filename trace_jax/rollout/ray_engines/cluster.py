"""The Ray cluster of a run: one that runs already, or one on this machine that ends with the run."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

from trace_jax.config import Config
from trace_jax.errors import UserError

ANSWERS_IN_S = 10.0
"""What the head of a cluster may take to accept a connection."""


@contextlib.contextmanager
def cluster(config: Config) -> Iterator[None]:
    """A connection to the cluster that `rollout.ray` asks for; a program that is connected already stays so.

    Raises:
      UserError: no cluster answers at the address, or none can be started.
    """
    if ray.is_initialized():
        yield
        return
    section = config.rollout.ray
    options: dict[str, Any] = {"address": section.address}
    if section.address is None:
        cpus = max(1, math.ceil(config.rollout.engines * section.num_cpus))
        options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        if section.object_store_gib is not None:
            options["object_store_memory"] = int(section.object_store_gib * 2**30)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        _require_answer(section.address)
    try:
        with _signals_kept(), warnings.catch_warnings():
            # Between fork and exec Ray's processes only set their signals, and need none of the locks that JAX's threads may hold.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a plain one where a node is not up after half a minute
        where = "no Ray cluster can be started on this machine" if section.address is None else f"rollout.ray.address {section.address}"
        raise UserError(f"{where}: {_first_line(error)}; see `ray status`") from error
    try:
        yield
    finally:
        ray.shutdown()


def demands(config: Config) -> dict[str, float]:
    """CPUs and GPUs of an engine, as options of its actor; the cluster is connected."""
    section, vllm = config.rollout.ray, config.rollout.vllm
    gpus = section.num_gpus
    if gpus is None:
        one = vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
        gpus = one if ray.cluster_resources().get("GPU", 0) else 0
    return {"num_cpus": section.num_cpus, "num_gpus": gpus}


def _require_answer(address: str) -> None:
    """Looks for a server at HOST:PORT before Ray does, which takes minutes to give up."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWERS_IN_S).close()
    except OSError as error:
        raise UserError(f"rollout.ray.address {address}: {_first_line(error)}; see `ray status`") from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` makes SIGTERM end the program at once; a run stops after its step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
