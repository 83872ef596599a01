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
from trace_jax.models.hf import load_hf_directory
from trace_jax.models.policy import Policy
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.state import TrainState

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja")


def import_hf_checkpoint(source: Path, out: Path) -> dict[str, Any]:
    """Reads `source` strictly and writes an Orbax checkpoint to `out`, with the tokenizer beside it.

    The checkpoint has a fresh optimizer and no multipliers: they are calibrated on the task it is first used with.

    Raises:
      UserError: `out` exists, or the source is not a complete checkpoint of a supported family.
    """
    if out.exists():
        raise UserError(f"{out} exists; choose another folder, nothing is overwritten")
    family, config, loaded = load_hf_directory(source)
    params = jax.tree.map(jnp.asarray, loaded)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = "byte"
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                (partial / "tokenizer").mkdir(exist_ok=True)
                shutil.copy2(source / name, partial / "tokenizer" / name)
        if (partial / "tokenizer" / "tokenizer.json").is_file():
            tokenizer = str((out / "tokenizer").absolute())
        settings = from_mapping({"model": {"family": family, "config": config.to_dict()}, "tokenizer": tokenizer})
        optimizer = make_optimizer(settings.optimizer)
        state = TrainState(params, jax.jit(optimizer.init)(params), {})
        checkpoints = Checkpoints(partial / "checkpoints")
        checkpoints.save(state, Progress(), Policy(family, config), tokenizer, settings.model_dump(mode="json"))
        checkpoints.close()
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"checkpoint": str(out), "family": family, "parameters": int(count), "tokenizer": tokenizer, "config": config.to_dict()}
