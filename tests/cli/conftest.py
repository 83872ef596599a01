"""The program as a subprocess, and one tiny policy that it trained, shared by every test of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

CONFIG = """
method: trace
tokenizer: ascii
model:
  compute_dtype: fp32
  config: {hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, num_experts: 4, experts_per_token: 2,
           expert_hidden_size: 32, max_position: 32}
task:
  name: "reasoning_gym:spell_backward"
  params: {min_word_len: 3, max_word_len: 4, size: 300}
  question_pattern: '(\\S+)$'
  reward: char_match
rollout: {group_size: 4, prompts_per_step: 2, max_new_tokens: 6}
guidance: {audit: {every: 1, sequences: 2}}
train: {micro_batch_tokens: 128, remat: false, unguided_every: 1}
eval: {every: 2, max_prompts: 4}
calibration: {prompts: 4}
sft: {steps: 10, batch_size: 16, eval_every: 10, max_prompts: 4}
steps: 2
loggers: []
"""

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def program(environment: dict[str, str]) -> Program:
    """`program("eval", ...)` runs `trace-jax eval ...` in a process of its own."""

    def run(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trace_jax", *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, program: Program) -> Path:
    """A folder with `config.yaml`, the cold start `sft` and the trained run `run`, and what the program printed as `*.json`."""
    path = tmp_path_factory.mktemp("commands")
    (path / "config.yaml").write_text(CONFIG)
    for command, out, overrides in (("sft", "sft", []), ("train", "run", [f"model.source={path / 'sft'}"])):
        done = program(command, path / "config.yaml", *overrides, "--out", path / out, "--json")
        assert done.returncode == 0, done.stderr
        (path / f"{out}.json").write_text(json.dumps({"stdout": done.stdout, "stderr": done.stderr}))
    return path
