"""The models that can be planned: some by name, others from a config.json, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.deepseek_v3.config import DeepseekV3Config
from trace_jax.models.gpt_oss.config import GptOssConfig
from trace_jax.models.hf import read_hf_config
from trace_jax.models.policy import Policy
from trace_jax.models.qwen3_5_moe.config import Qwen35MoeConfig
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.registry import ModelConfig
from trace_jax.train.read_checkpoint import locate_checkpoint, policy_from_meta, read_meta

_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_kv_heads": 4, "num_experts": 128, "experts_per_token": 8}
_QWEN3 |= {"max_position": 40_960}

MODELS: dict[str, ModelConfig] = {
    "Qwen3-30B-A3B": Qwen3MoeConfig(**_QWEN3, hidden_size=2048, num_layers=48, num_heads=32, expert_hidden_size=768),
    "Qwen3-235B-A22B": Qwen3MoeConfig(**_QWEN3, hidden_size=4096, num_layers=94, num_heads=64, expert_hidden_size=1536),
    # The model of TRACE's first table. Sizes that the papers do not state (heads, delta-nets, vocabulary) are those of Qwen3-Next.
    "Qwen3.5-35B-A3B": Qwen35MoeConfig(
        vocab_size=248_320, hidden_size=2048, num_layers=40, num_heads=16, num_kv_heads=2, head_dim=256, num_experts=256,
        experts_per_token=8, expert_hidden_size=512, shared_hidden_size=512, rotary_dim=64, linear_key_heads=16, linear_value_heads=32,
        linear_key_dim=128, linear_value_dim=128, max_position=262_144,
    ),
    "gpt-oss-120b": GptOssConfig(
        vocab_size=201_088, hidden_size=2880, num_layers=36, num_heads=64, num_kv_heads=8, head_dim=64, num_experts=128,
        experts_per_token=4, expert_hidden_size=2880, sliding_window=128, max_position=131_072,
    ),
    "DeepSeek-V3": DeepseekV3Config(
        vocab_size=129_280, hidden_size=7168, num_layers=61, num_heads=128, num_experts=256, experts_per_token=8, expert_hidden_size=2048,
        dense_layers=3, dense_hidden_size=18_432, expert_groups=8, kept_groups=4, routed_scaling=2.5, query_rank=1536, latent_rank=512,
        plain_dim=128, rotary_dim=64, value_dim=128, max_position=163_840,
    ),
}  # fmt: skip
"""Geometries of published config.json files."""


def policy_of(model: str) -> Policy:
    """A model by name, or the policy of a Hugging Face directory or config.json, a run or a checkpoint; no weight is read.

    Raises:
      UserError: it is none of these, or of a family that is not supported.
    """
    for name, config in MODELS.items():
        if name.lower() == model.lower():
            return Policy(config.FAMILY, config)
    path = Path(model)
    if not path.exists():
        raise UserError(f"{model} is neither a file or folder nor a known model; known are: {', '.join(MODELS)}")
    if path.name == "config.json" or (path / "config.json").is_file():
        return Policy(*read_hf_config(path if path.is_dir() else path.parent))
    return policy_from_meta(read_meta(locate_checkpoint(path)))
