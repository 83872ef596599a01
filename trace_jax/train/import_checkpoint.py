"""`trace-jax import`: a Hugging Face or GGUF checkpoint becomes a checkpoint that `train`, `eval` and `mismatch` open."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import Config, from_mapping
from trace_jax.errors import UserError
from trace_jax.models.gguf_file import write_hf_directory
from trace_jax.models.hf import carried_files, open_hf_directory
from trace_jax.models.hf_tensors import pieces
from trace_jax.models.policy import Policy
from trace_jax.models.registry import ModelConfig, param_shapes
from trace_jax.models.upcycled_files import Upcycling
from trace_jax.tokenizers import load_tokenizer
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.state import TrainState
from trace_jax.train.stream_checkpoint import fill, placeholders

CARRIED = "tokenizer"
"""Folder of the tokenizer and generation files in an imported checkpoint, and the tokenizer's name there: it moves with the checkpoint."""

GGUF_SUFFIX = ".gguf"
UNPACKED = "unpacked"
"""Folder of what a GGUF file holds, while it is imported."""


def import_hf_checkpoint(source: Path, out: Path, upcycling: Upcycling | None = None) -> dict[str, Any]:
    """Reads `source` strictly and writes an Orbax checkpoint to `out`, with the tokenizer beside it.

    One tensor is in memory at a time. Without a tokenizer.json the tokenizer is "byte", or "ascii" where the vocabulary is too small for
    "byte". The checkpoint has no optimizer and no multipliers: they are made for the task it is first used with.

    Args:
      source: a Hugging Face directory, or a GGUF file.
      upcycling: how a dense checkpoint becomes a mixture of experts; None keeps it as it is.

    Raises:
      UserError: `out` exists, the source is not a complete checkpoint of a supported family, or no tokenizer fits its vocabulary.
    """
    if out.exists():
        raise UserError(f"{out} exists; choose another folder, nothing is overwritten")
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        directory = source
        if source.is_file() and source.suffix.lower() == GGUF_SUFFIX:
            directory = partial / UNPACKED
            directory.mkdir()
            write_hf_directory(source, directory)
        result = _import_directory(directory, partial, upcycling)
        shutil.rmtree(partial / UNPACKED, ignore_errors=True)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # not empty after a success
                folder.rmdir()
    shown = str(out / CARRIED) if result["tokenizer"] == CARRIED else result["tokenizer"]
    return {"checkpoint": str(out), **result, "tokenizer": shown}


def _import_directory(source: Path, folder: Path, upcycling: Upcycling | None) -> dict[str, Any]:
    with open_hf_directory(source, upcycling) as opened:
        family, config = opened.family, opened.config
        tokenizer = fitting_tokenizer(source, config.vocab_size)
        for file in carried_files(source):
            (folder / CARRIED).mkdir(exist_ok=True)
            shutil.copy2(file, folder / CARRIED / file.name)
        settings = untrained_settings(family, config, tokenizer)
        shapes = param_shapes(family, config)
        checkpoints = Checkpoints(folder / "checkpoints")
        state = TrainState(placeholders(shapes), {}, {})
        checkpoints.save(state, Progress(), Policy(family, config), tokenizer, settings.model_dump(mode="json"))
        checkpoints.close()
        fill(folder / "checkpoints" / "0", shapes, pieces(opened.files, opened.entries))
    count = sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(shapes))
    return {"family": family, "parameters": count, "tokenizer": tokenizer, "config": config.to_dict()}


def untrained_settings(family: str, config: ModelConfig, tokenizer: str) -> Config:
    """The settings of a policy that was not trained here; its rollout rounds what the family has and nothing else."""
    values: dict[str, Any] = {"model": {"family": family, "config": config.to_dict()}, "tokenizer": tokenizer}
    if not config.moe_layer_ids:
        return from_mapping({**values, "method": "bf16"})
    if config.layers_of("k"):
        return from_mapping(values)
    return from_mapping({**values, "rollout": {"kv_cache": {"k": "bf16", "v": "bf16"}}, "train_quant": {"kv_cache": "none"}})


def fitting_tokenizer(source: Path, vocabulary: int) -> str:
    """`CARRIED` for the source's own tokenizer, or without one the first built-in tokenizer whose ids the model has.

    Raises:
      UserError: there is none.
    """
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
