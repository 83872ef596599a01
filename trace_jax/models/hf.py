"""Hugging Face checkpoint directories: strict reading, atomic writing.

A family's folder carries the name of its Hugging Face `model_type`; its modules `hf_config` and `params` know the config
keys and the tensor names.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from trace_jax.errors import UserError
from trace_jax.files import flush_to_disk
from trace_jax.models.hf_config import agreeing
from trace_jax.models.hf_tensors import Source, entries_in, from_hf_tensors, to_hf_tensors
from trace_jax.models.key_map import FLOAT32_LEAVES, Entry, file_shapes, parameter_shapes
from trace_jax.models.quantized_files import QuantizedTensorFiles
from trace_jax.models.registry import FAMILIES, key_map
from trace_jax.models.tensor_files import TensorFiles, read_json, write_tensors
from trace_jax.models.upcycled_files import UpcycledFiles, Upcycling, upcycling_target

STORED_DTYPES = ("bfloat16", "float16", "float32")
MAX_SHARD_BYTES = 5_000_000_000

CARRIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files that belong to the tokenizer or the sampling defaults and do not depend on the weights."""


class HfCheckpoint(NamedTuple):
    """A checkpoint in our terms.

    Args:
      family: folder name below `trace_jax.models`.
      config: the family's config.
      params: nested dict of float32 NumPy arrays.
    """

    family: str
    config: Any
    params: dict[Any, Any]


class OpenHfCheckpoint(NamedTuple):
    """A checkpoint that stays on disk: family, config, the entries of its key map as the files hold them, and the files."""

    family: str
    config: Any
    entries: list[Entry]
    files: Source


def read_hf_config(directory: Path) -> tuple[str, Any]:
    """Family and config of a directory; no weight is looked at.

    Raises:
      UserError: there is no config.json, or its family or configuration is not supported.
    """
    config_json = read_json(directory / "config.json")
    config_json.pop("quantization_config", None)
    return _read_config(directory, config_json)


@contextmanager
def open_hf_directory(path: str | Path, upcycling: Upcycling | None = None) -> Iterator[OpenHfCheckpoint]:
    """Reads config.json and the names and shapes of all tensors; each parameter is filled exactly once and each key accounted for.

    Args:
      path: directory with config.json and safetensors (one file, or shards with an index), quantized or not.
      upcycling: how a dense checkpoint is read as a mixture of experts; None reads it as it is.

    Raises:
      UserError: the directory is incomplete or damaged, its family or configuration is not supported, or its tensors
        are not exactly those of the config.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give the directory of a Hugging Face checkpoint, or a .gguf file to import")
    config_json = read_json(directory / "config.json")
    quantization = config_json.pop("quantization_config", None)
    family, config = _read_config(directory, config_json)
    with TensorFiles(directory) if quantization is None else QuantizedTensorFiles(directory, quantization) as files:
        further = _further_layers(config_json, config.num_layers)
        source: Source = files
        if upcycling is not None:
            target = upcycling_target(family)
            family, config = _read_config(directory, target.config(config_json, upcycling))
            source = UpcycledFiles(files, target, config.num_layers, upcycling)
        yield OpenHfCheckpoint(family, config, entries_in(source, config, key_map(family, config), further), source)


def load_hf_directory(path: str | Path) -> HfCheckpoint:
    """Reads a checkpoint into memory; arguments and errors are those of `open_hf_directory`, errors of `pieces` are added."""
    with open_hf_directory(path) as opened:
        shapes = parameter_shapes(key_map(opened.family, opened.config))
        return HfCheckpoint(opened.family, opened.config, from_hf_tensors(opened.files, opened.entries, shapes))


def save_hf_directory(
    path: str | Path,
    family: str,
    config: Any,
    params: dict[Any, Any],
    *,
    dtype: DTypeLike = "bfloat16",
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a directory that transformers and vLLM load; it appears complete or not at all.

    Args:
      path: target; must not exist, or be an empty directory.
      family: folder name below `trace_jax.models`.
      config: the family's config.
      params: nested dict of NumPy or JAX arrays, as the family's key map describes.
      dtype: `bfloat16`, `float16` or `float32`; values are rounded to nearest even.
      tokenizer_dir: directory whose tokenizer and generation files are copied over.
      max_shard_bytes: tensors beyond this size are spread over several files.

    Raises:
      UserError: the target exists, the tokenizer directory has no known file, the parameters do not fit the config or
        are not finite, or the disk refuses.
    """
    target, stored = Path(os.path.abspath(path)), np.dtype(dtype)
    if stored.name not in STORED_DTYPES:
        raise UserError(f"dtype {stored.name} cannot be stored; write one of {', '.join(STORED_DTYPES)}")
    entries = key_map(family, config)
    carried = [] if tokenizer_dir is None else carried_files(tokenizer_dir)
    if tokenizer_dir is not None and not carried:
        raise UserError(f"{tokenizer_dir} holds no tokenizer or generation file such as tokenizer.json; give a tokenizer directory")
    with appearing_directory(target) as directory:
        kept = frozenset(entry.name for entry in entries if entry.path[-1] in FLOAT32_LEAVES)
        write_tensors(directory, list(file_shapes(entries).items()), to_hf_tensors(entries, params), stored, max_shard_bytes, kept)
        write_config(directory, family, config, torch_dtype=stored.name)
        for file in carried:
            shutil.copyfile(file, directory / file.name)


def write_config(directory: Path, family: str, config: Any, **values: Any) -> None:
    """Writes `config.json` of a family's config, with further keys."""
    config_json = {**_hf_config(family).to_hf(config), **values}
    (directory / "config.json").write_text(json.dumps(config_json, indent=2, sort_keys=True) + "\n")


@contextmanager
def appearing_directory(target: Path) -> Iterator[Path]:
    """A new directory `<target>.partial-...` that takes the target's name on success and vanishes on failure.

    Raises:
      UserError: the target exists and is not an empty directory, or the disk refuses.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty directory; remove it or choose another name")
    temporary = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            flush_to_disk(file)
        temporary.rename(target)
        flush_to_disk(target.parent)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}; free space or choose another directory") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def carried_files(directory: str | Path) -> list[Path]:
    """The `CARRIED_FILES` that a directory holds."""
    return [file for name in CARRIED_FILES if (file := Path(directory) / name).is_file()]


def _read_config(directory: Path, config_json: dict[str, Any]) -> tuple[str, Any]:
    model_type = config_json.get("model_type")
    family = next((name for name, made in FAMILIES.items() if model_type in (name, made.MODEL_TYPE or name)), None)
    if family is None:
        raise UserError(
            f"{directory}: config.json: model_type is {model_type!r}; take a checkpoint of a supported type: {', '.join(FAMILIES)}"
        )
    try:
        return family, _hf_config(family).from_hf(config_json)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error


def _hf_config(family: str) -> ModuleType:
    return importlib.import_module(f"trace_jax.models.{family}.hf_config")


def _further_layers(config_json: dict[str, Any], count: int) -> range:
    """Layers behind the decoder's own that predict further tokens; families that have none have refused the keys."""
    further = agreeing({name: config_json.get(name) for name in ("num_nextn_predict_layers", "num_mtp_layers")})
    return range(count, count + (further or 0))
