"""The tokenizer inside a GGUF file as the files of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.hf import carried_files

CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF: special tokens, and whole words outside of the merges."""

SPLITS: dict[str, tuple[dict[str, Any], ...]] = {
    "gpt-2": (),
    "smollm": ({"type": "Digits", "individual_digits": True},),
}
"""`tokenizer.ggml.pre` -> what cuts a text before the byte-level words of GPT-2."""

NAMES = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}


def write_tokenizer(path: Path, fields: dict[str, Any], directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json; a tokenizer.json beside the file is taken instead.

    Args:
      path: the GGUF file.
      fields: its keys.
      directory: where to.

    Raises:
      UserError: the tokenizer is of a kind that is not read.
    """
    if (path.parent / "tokenizer.json").is_file():
        for file in carried_files(path.parent):
            shutil.copyfile(file, directory / file.name)
        return
    found = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items() if name.startswith("tokenizer.ggml.")}
    if found.get("model") != "gpt2" or found.get("pre") not in SPLITS:
        raise UserError(
            f"{path}: its tokenizer is {found.get('model')!r} with {found.get('pre')!r}; read are byte-level BPE with {', '.join(SPLITS)}: "
            "put the model's tokenizer.json beside the file"
        )
    tokens, types = found["tokens"], found["token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": index, "content": tokens[index], "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*SPLITS[found["pre"]], byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": found["merges"]},
    }
    specials = {name: tokens[found[f"{key}_token_id"]] for key, name in NAMES.items() if f"{key}_token_id" in found}
    template = {"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}
    generation = {
        f"{key}_token_id": found[f"{name}_token_id"]
        for key, name in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")]
        if f"{name}_token_id" in found
    }
    _write(directory / "tokenizer.json", tokenizer)
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **specials, **template})
    _write(directory / "generation_config.json", generation)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
