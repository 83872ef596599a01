"""Tiny Qwen3-MoE checkpoints in the Hugging Face layout, made by this project's own writer."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trace_jax.layers.attention import causal_mask
from trace_jax.layers.logprobs import logits_of
from trace_jax.models.hf import save_hf_directory
from trace_jax.models.inputs import ForwardInputs, ForwardOptions
from trace_jax.models.key_map import parameter_shapes
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.qwen3_moe.params import key_map
from trace_jax.models.registry import apply, output_head

TINY = Qwen3MoeConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=3,
    experts_per_token=2,
    expert_hidden_size=5,
    rope_theta=10_000.0,
    max_position=32,
)


def random_params(config: Qwen3MoeConfig, seed: int = 0) -> dict[Any, Any]:
    """A parameter tree of distinct random float32 values that BF16 holds exactly."""
    rng = np.random.default_rng(seed)
    tree: dict[Any, Any] = {}
    for path, shape in parameter_shapes(key_map(config)).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = (rng.integers(-128, 128, shape) / 64).astype(np.float32)
    return tree


class Checkpoint:
    """A directory that a test may damage."""

    def __init__(self, path: Path, config: Qwen3MoeConfig, params: dict[Any, Any]):
        self.path, self.config, self.params = path, config, params

    def edit_config(self, **changes: Any) -> None:
        """Sets keys of config.json; the value `...` removes one."""
        file = self.path / "config.json"
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors of the single file."""
        return load_file(self.path / "model.safetensors")

    def edit_tensors(self, **options: Any) -> None:
        """Replaces tensors (`set={name: array}`) and removes some (`drop=[name]`)."""
        tensors = {**self.tensors(), **options.get("set", {})}
        kept = {name: value for name, value in tensors.items() if name not in options.get("drop", [])}
        save_file(kept, self.path / "model.safetensors")


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Writes a checkpoint of the tiny config, with changed fields if given: `make_checkpoint("name", tie_embeddings=True)`."""

    def make(name: str = "checkpoint", save_options: dict[str, Any] | None = None, **changes: Any) -> Checkpoint:
        config = dataclasses.replace(TINY, **changes)
        params = random_params(config)
        save_hf_directory(tmp_path / name, "qwen3_moe", config, params, **(save_options or {}))
        return Checkpoint(tmp_path / name, config, params)

    return make


@functools.partial(jax.jit, static_argnames=("config", "experts_implementation"))
def _logits(config: Qwen3MoeConfig, params: Any, tokens: jax.Array, experts_implementation: str) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    mask = causal_mask(positions, jnp.ones(tokens.shape, jnp.int32))
    inputs = ForwardInputs(tokens=tokens, positions=positions, mask=mask, multipliers={})
    options = ForwardOptions(compute_dtype="float32", experts_implementation=experts_implementation)
    hidden = apply("qwen3_moe", config, params, inputs, options).hidden
    return logits_of(hidden, output_head("qwen3_moe", config, params))


@pytest.fixture
def unquantized_logits() -> Callable[..., jax.Array]:
    """Logits `[B, T, V]` of a Qwen3-MoE without quantization, in float32: `unquantized_logits(config, params, tokens)`."""

    def logits(config: Qwen3MoeConfig, params: Any, tokens: np.ndarray, experts_implementation: str = "dense") -> jax.Array:
        return _logits(config, params, jnp.asarray(tokens, jnp.int32), experts_implementation)

    return logits
