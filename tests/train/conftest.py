"""A policy of a few thousand parameters, cold-started once, that all tests of the training side share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trace_jax.config import Config
from trace_jax.config.load import from_mapping
from trace_jax.train.run_sft import run_sft

VALUES: dict[str, Any] = {
    "method": "trace",
    "tokenizer": "ascii",
    "model": {
        "compute_dtype": "fp32",  # one set of compiled programs for all files, and no order of sums moves a value over an FP4 boundary
        "config": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "experts_per_token": 2,
            "expert_hidden_size": 32,
            "max_position": 32,
        },
    },
    "task": {
        "name": "reasoning_gym:spell_backward",
        "params": {"min_word_len": 3, "max_word_len": 4, "size": 300},
        "question_pattern": r"(\S+)$",
        "reward": "char_match",
    },
    "rollout": {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6},
    "guidance": {"audit": {"every": 2, "sequences": 2}},
    "train": {"micro_batch_tokens": 64, "remat": False, "unguided_every": 2},
    "optimizer": {"learning_rate": 1.0e-3, "warmup_steps": 3},
    "eval": {"every": 2, "max_prompts": 4},
    "checkpoint": {"every": 2},
    "calibration": {"prompts": 4},
    "sft": {"steps": 60, "batch_size": 16, "eval_every": 20, "learning_rate": 1.0e-2, "warmup_steps": 5, "max_prompts": 8},
    "steps": 4,
    "loggers": [],
}

MakeConfig = Callable[..., Config]


class ColdStart(NamedTuple):
    """A finished supervised run: its directory, and the metrics of each step."""

    directory: Path
    steps: list[dict[str, Any]]


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """The tiny configuration as nested values; a copy."""
    return copy.deepcopy(VALUES)


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """`make_config("steps=2", ...)`: the tiny configuration with overrides."""
    return lambda *overrides: from_mapping(VALUES, overrides)


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> ColdStart:
    """The policy after a short supervised run: its answers have the right letters often enough to earn unequal rewards."""
    directory = tmp_path_factory.mktemp("sft")
    steps: list[dict[str, Any]] = []
    run_sft(make_config(), directory, lambda _, metrics: steps.append(metrics))
    return ColdStart(directory, steps)
