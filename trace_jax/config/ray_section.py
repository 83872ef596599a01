"""The section `rollout.ray`: the cluster on which engines run. Read with `rollout.launcher: ray` only."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trace_jax.config.section import Count, Rate, Section


class RaySection(Section):
    """How engines are placed and replaced by Ray; every figure is that of one engine.

    Args:
      address: of a running cluster (`auto` or HOST:PORT); null starts one on this machine, which ends with the run.
      num_cpus: CPUs that an engine reserves.
      num_gpus: GPUs that an engine reserves and sees; null is as many as `rollout.vllm.tensor_parallel`, or 1, where the cluster has any.
      max_restarts: how often Ray starts an engine again in place of a lost one.
      start_timeout_s: what an engine may take to be placed, started and loaded, and to take an update.
      silence_timeout_s: after so long without an answer to a call, such as one wave, an engine counts as hung and is replaced.
      object_store_gib: shared memory of a cluster that is started; null is Ray's choice, a third of the memory.
    """

    address: str | None = None
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None
    max_restarts: Count = 3
    start_timeout_s: Rate = 600.0
    silence_timeout_s: Rate = 3600.0
    object_store_gib: Rate | None = None
