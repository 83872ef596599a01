"""A tiny random policy as a configuration file, for what opens a policy and lets it answer."""

from __future__ import annotations

from pathlib import Path

import pytest

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
train: {micro_batch_tokens: 128, remat: false}
calibration: {prompts: 4}
loggers: []
"""


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration as a YAML file."""
    path = tmp_path_factory.mktemp("evaluation") / "config.yaml"
    path.write_text(CONFIG)
    return path
