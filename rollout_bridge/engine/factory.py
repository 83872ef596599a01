"""`rollout.engine: vllm`: from a run's setup to an engine whose worker has loaded the model, without weights."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rollout_bridge.engine.blank_checkpoint import write_blank_checkpoint
from rollout_bridge.engine.engine import EngineLimits, VllmEngine
from rollout_bridge.engine.in_process import InProcessLink
from rollout_bridge.engine.parallel import require_divisible
from rollout_bridge.engine.process import ProcessLink, WorkerCommand, vllm_command
from rollout_bridge.engine.records import CapturedRecords, capture_layout
from rollout_bridge.engine.worker_folder import write_worker_folder
from rollout_bridge.export.settings import ExportSettings
from rollout_bridge.vllm_plugin.serve.arguments import RESERVED
from rollout_bridge.vllm_plugin.serve.build import build
from rollout_bridge.wire import Ring
from trace_jax.errors import UserError
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout.engine_setup import EngineSetup
from trace_jax.rollout.weight_sync import expected_tensors

EXPERT_FORMATS = (("nvfp4", "nvfp4"), ("nvfp4", "bf16"), ("mxfp4", "mxfp4"), ("mxfp4", "bf16"), ("bf16", "bf16"))
"""Weights and activations of experts that vLLM serves with the plugin."""

LARGEST_SLOT = 16 << 20
"""Bytes of a slot of the weights' ring: three of them fit into the 64 MiB of shared memory that containers often have."""

STEP_TOKENS = 2048
"""Tokens of a forward pass at most, unless one sequence can be longer; a prompt is never divided between two."""

CAPTURE_SLOTS = 2
"""One forward's records are read while the next one's are written."""

_NAME_AND_HEAD = 1024
"""More than a tensor takes in a record beside its bytes."""


def make(setup: EngineSetup) -> VllmEngine:
    """The engine of a run.

    Raises:
      UserError: formats that vLLM does not serve, arguments that are not the user's, or a worker that does not start.
    """
    section = setup.config.rollout.vllm
    settings = export_settings(setup.rollout_plan)
    require_divisible(setup)
    arguments = engine_arguments(setup)
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="trace-jax-vllm-")))
        model = write_blank_checkpoint(folder / "model", setup.policy, settings)
        records, capture = captured_records(setup, arguments["max_num_batched_tokens"], resources)
        start = {"type": "start", "arguments": {"model": str(model), **arguments}, "capture": capture}
        limits = EngineLimits(
            context=arguments["max_model_len"],
            vocabulary=setup.policy.config.vocab_size,
            slot_bytes=slot_bytes(setup),
            silence_s=section.silence_timeout_s,
            max_restarts=section.max_restarts,
        )
        channels = {site: np.asarray(ids).tolist() for site, ids in setup.channels.items()}
        if section.mode == "in_process":
            engine = VllmEngine(lambda: InProcessLink(build, start), limits, records, channels)
        else:
            command = WorkerCommand(
                command=vllm_command(section.python or sys.executable),
                folder=write_worker_folder(folder / "worker"),
                log=(setup.directory or folder).absolute() / "vllm.log",
                start_timeout_s=section.start_timeout_s,
                send_timeout_s=section.silence_timeout_s,
            )
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with _log_kept_on_failure(command.log):
                engine = VllmEngine(lambda: ProcessLink(command, start), limits, records, channels)
        engine.resources = resources.pop_all()
        return engine


def export_settings(plan: QuantPlan) -> ExportSettings:
    """The layout of the checkpoint that stands for a rollout plan.

    Raises:
      UserError: formats that vLLM does not serve.
    """
    weights, activations = plan.weights, plan.expert_input.format
    if (weights, activations) not in EXPERT_FORMATS:
        served = ", ".join("/".join(pair) for pair in EXPERT_FORMATS)
        raise UserError(
            f"rollout.engine vllm serves experts with weights/activations {served}; rollout.weights is {weights} and rollout.activations "
            f"{activations}; write one of these, or engine: jax"
        )
    for side in ("k", "v"):
        served = ("nvfp4", "bf16") if weights == "nvfp4" else ("bf16",)  # the multipliers of K and V lie in an NVFP4 checkpoint
        if plan.site(side).format not in served:
            raise UserError(
                f"rollout.engine vllm keeps K and V in {' or '.join(served)} beside {weights} weights; rollout.kv_cache.{side} is "
                f"{plan.site(side).format}; write {served[-1]}, or engine: jax"
            )
    if plan.per_token:
        raise UserError("rollout.activation_scale is per_token, which rollout.engine vllm has not; write static, or engine: jax")
    return ExportSettings(weights, activations=activations)


def engine_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Arguments of `vllm.LLM` beside the model's folder and the fixed ones.

    Raises:
      UserError: `rollout.vllm.engine_args` names one that is not the user's.
    """
    rollout, section, plan = setup.config.rollout, setup.config.rollout.vllm, setup.rollout_plan
    taken = sorted(set(section.engine_args) & set(RESERVED))
    if taken:
        raise UserError(f"rollout.vllm.engine_args.{taken[0]} is set by the engine or by another key of rollout; remove it")
    plugin = {
        "kv_cache": {"k": plan.k.format, "v": plan.v.format},
        "residual_compensation": rollout.residual_compensation.model_dump(mode="json"),
    }
    arguments: dict[str, Any] = {
        "dtype": setup.policy.compute_dtype,
        "seed": setup.config.seed,
        "max_model_len": setup.policy.config.max_position,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "additional_config": {"trace_jax": plugin},
        "tensor_parallel_size": section.tensor_parallel,
        **section.engine_args,
    }
    if section.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    if rollout.max_batch is not None:
        arguments["max_num_seqs"] = rollout.max_batch
    arguments.setdefault("max_num_batched_tokens", max(STEP_TOKENS, arguments["max_model_len"], arguments.get("max_num_seqs", 0)))
    if section.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = math.ceil(section.kv_cache_gib * 2**30)
    return arguments


def captured_records(setup: EngineSetup, step_tokens: int, resources: ExitStack) -> tuple[CapturedRecords, dict[str, Any]]:
    """The records of a run, and what the worker must know to capture them.

    Args:
      step_tokens: most tokens of a forward pass, whose records are one record of the ring.
      resources: gets the rings.
    """
    spec, audit = setup.capture(), setup.config.guidance.audit.every > 0
    layout = capture_layout(setup.policy.config, setup.rollout_plan, spec, audit)
    workers, size = setup.config.rollout.vllm.tensor_parallel, layout.record_bytes(step_tokens)
    rings = [resources.enter_context(Ring.create(slots=CAPTURE_SLOTS, slot_bytes=size)).path for _ in range(workers)]
    records = CapturedRecords(rings, setup.policy.config, setup.rollout_plan, spec, audit)
    return records, {"rings": [str(ring) for ring in rings], "plan": layout.plan()}


def slot_bytes(setup: EngineSetup) -> int:
    """Bytes of a record of weights: a whole layer, or the most that a slot may have."""
    layers: dict[str, int] = {}
    for name, (dtype, shape) in expected_tensors(setup.policy, setup.rollout_plan).items():
        layer = name.partition("layers.")[2].partition(".")[0]
        layers[layer] = layers.get(layer, 0) + math.prod(shape) * jnp.dtype(dtype).itemsize + _NAME_AND_HEAD
    return min(LARGEST_SLOT, max(layers.values()))


@contextmanager
def _log_kept_on_failure(log: Path) -> Iterator[None]:
    """A run that does not start leaves nothing in its folder; the log that its last line names must stay all the same."""
    try:
        yield
    except UserError as error:
        if not log.exists():
            raise
        descriptor, copy = tempfile.mkstemp(prefix="trace-jax-vllm-", suffix=".log")
        os.close(descriptor)
        shutil.copyfile(log, copy)
        raise UserError(str(error).replace(str(log), copy)) from None
