"""The section `rollout.vllm`: the process in which vLLM generates. Read with `rollout.engine: vllm` only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trace_jax.config.section import Count, Positive, Rate, Section


class VllmSection(Section):
    """How vLLM is run. It computes in `model.compute_dtype`, generates at most `rollout.max_batch` sequences at a time, and never
    compiles, caches prefixes or splits prompts, since what it records and its sampling depend on that.

    Args:
      python: interpreter of an environment that has vLLM, and need not have jax; null is the trainer's own.
      mode: `process` starts a worker; `in_process` runs vLLM in the trainer's process, for debugging, in an environment that has both.
      tensor_parallel: workers between which heads and experts' columns are divided, on as many GPUs of one machine, or on CPU.
      kv_cache_gib: memory of the KV cache of each worker; null is what `gpu_memory_utilization` leaves, and 1 on CPU.
      gpu_memory_utilization: share of the GPU's memory for vLLM; lower it where the trainer uses the same GPU.
      start_timeout_s: what a worker may take to import vLLM and load the model.
      silence_timeout_s: after so long without a word from a worker that has work, it is killed and replaced; one step of the engine, and
        the loading of new weights, must be faster.
      max_restarts: workers started in place of dead ones in a run; 0 ends the run with the first.
      engine_args: further arguments of `vllm.LLM`, such as `max_model_len`.
    """

    python: str | None = None
    mode: Literal["process", "in_process"] = "process"
    tensor_parallel: Positive = 1
    kv_cache_gib: Rate | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    start_timeout_s: Rate = 600.0
    silence_timeout_s: Rate = 300.0
    max_restarts: Count = 3
    engine_args: dict[str, Any] = {}
