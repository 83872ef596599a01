"""`trace-jax import`: a Hugging Face checkpoint becomes a checkpoint that `train`, `eval` and `mismatch` open."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax.config import from_mapping
from trace_jax.errors import UserError
from trace_jax.models.hf import carried_files, load_hf_directory
from trace_jax.models.policy import Policy
from trace_jax.models.registry import ModelConfig
from trace_jax.tokenizers import load_tokenizer
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.state import initial_state

CARRIED = "tokenizer"
"""Folder of the tokenizer and generation files in an imported checkpoint, and the tokenizer's name there: it moves with the checkpoint."""


def import_hf_checkpoint(source: Path, out: Path) -> dict[str, Any]:
    """Reads `source` strictly and writes an Orbax checkpoint to `out`, with the tokenizer beside it.

    Without a tokenizer.json the tokenizer is "byte", or "ascii" where the vocabulary is too small for "byte".
    The checkpoint has a fresh optimizer and no multipliers: they are calibrated on the task it is first used with.

    Raises:
      UserError: `out` exists, the source is not a complete checkpoint of a supported family, or no tokenizer fits its vocabulary.
    """
    if out.exists():
        raise UserError(f"{out} exists; choose another folder, nothing is overwritten")
    family, config, loaded = load_hf_directory(source)
    tokenizer = _fitting_tokenizer(source, config.vocab_size)
    params = jax.tree.map(jnp.asarray, loaded)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        for file in carried_files(source):
            (partial / CARRIED).mkdir(exist_ok=True)
            shutil.copy2(file, partial / CARRIED / file.name)
        model = {"family": family, "config": config.to_dict()}
        settings = from_mapping({"model": model, "tokenizer": tokenizer, **_fitting_rollout(config)})
        state = initial_state(params, make_optimizer(settings.optimizer), {})
        checkpoints = Checkpoints(partial / "checkpoints")
        checkpoints.save(state, Progress(), Policy(family, config), tokenizer, settings.model_dump(mode="json"))
        checkpoints.close()
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    shown = str(out / CARRIED) if tokenizer == CARRIED else tokenizer
    return {"checkpoint": str(out), "family": family, "parameters": int(count), "tokenizer": shown, "config": config.to_dict()}


def _fitting_rollout(config: ModelConfig) -> dict[str, Any]:
    """Settings of a rollout that rounds only what the family has."""
    if not config.moe_layer_ids:
        return {"method": "bf16"}
    if config.layers_of("k"):
        return {}
    return {"rollout": {"kv_cache": {"k": "bf16", "v": "bf16"}}, "train_quant": {"kv_cache": "none"}}


def _fitting_tokenizer(source: Path, vocabulary: int) -> str:
    """`CARRIED` for the source's own tokenizer, or without one the first built-in tokenizer whose ids the model has."""
    if (source / "tokenizer.json").is_file():
        size = load_tokenizer(str(source.absolute())).vocab_size
        if size > vocabulary:
            raise UserError(
                f"{source}: tokenizer.json has {size} tokens, but config.json a vocab_size of {vocabulary}; "
                "put the tokenizer.json there that belongs to the model"
            )
        return CARRIED
    sizes = {name: load_tokenizer(name).vocab_size for name in ("byte", "ascii")}
    for name, size in sizes.items():
        if size <= vocabulary:
            return name
    known = " and ".join(f"{name} ({size} tokens)" for name, size in sizes.items())
    raise UserError(f"{source}: no tokenizer.json, and {known} exceed its vocab_size of {vocabulary}; put the model's tokenizer.json there")
