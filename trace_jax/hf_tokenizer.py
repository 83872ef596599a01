"""Hugging Face tokenizer directories, read with `tokenizers` and, for a chat template, Jinja; transformers is not needed."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from trace_jax.errors import UserError

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""Marks the assistant's part for transformers' loss masks and prints nothing."""

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer.json with the special tokens and the chat template of its directory.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      template: compiled chat template, None without one.
      specials: names and texts of the special tokens, which templates may use.
    """

    name: str
    tokenizer: Any
    template: Any
    specials: Mapping[str, str]
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it is: none is added, and special tokens written out in it become their ids."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special ids."""
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def apply_prompt(self, question: Prompt) -> list[int]:
        """The chat template with its generation prompt; without a template bos (if any), the text and a newline.

        Raises:
          UserError: the template refuses the conversation.
        """
        if self.template is None:
            text = question if isinstance(question, str) else "\n".join(message["content"] for message in question)
            return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text + "\n")]
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(message) for message in question]
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.specials)
        except Exception as error:
            # Templates fail in many ways, some of them on purpose ("system role not supported").
            raise UserError(f"tokenizer {self.name}: its chat template refuses the prompt ({error}); change one of them") from error
        return self.encode(text)


def load_hf_tokenizer(path: str) -> HFTokenizer:
    """The tokenizer of a directory.

    Args:
      path: directory with tokenizer.json and, as far as there are any, tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and generation_config.json (further stop ids).

    Raises:
      UserError: no such directory, a file missing or broken, no end-of-sequence token.
    """
    if not os.path.isdir(path):
        raise UserError(f"tokenizer {path!r} is not a directory; write byte, ascii or a directory with a Hugging Face tokenizer.json")
    file = os.path.join(path, "tokenizer.json")
    if not os.path.isfile(file):
        raise UserError(f"tokenizer directory {path!r} has no tokenizer.json; save a fast tokenizer there with save_pretrained")
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"tokenizer {path!r} needs the package tokenizers; install it with pip install tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:
        # The Rust library raises bare Exception for every kind of broken file.
        raise UserError(f"{file} cannot be read ({str(error)[:200]}); save the tokenizer again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = {**_read_json(path, "special_tokens_map.json"), **_read_json(path, "tokenizer_config.json")}
    specials = {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name) is not None}
    ids = {name: tokenizer.token_to_id(text) for name, text in specials.items()}
    stops = _generation_stop_ids(path)
    eos = ids.get("eos_token", stops[0] if stops else None)
    if eos is None:
        raise UserError(f"tokenizer directory {path!r} names no eos_token; add it to tokenizer_config.json, else no answer could end")
    pad = ids.get("pad_token")
    return HFTokenizer(
        name=path,
        tokenizer=tokenizer,
        template=_template(path, config),
        specials=specials,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=ids.get("bos_token"),
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        stop_ids=tuple(dict.fromkeys([eos, *stops])),
    )


def _template(path: str, config: Mapping[str, Any]) -> Any:
    """The compiled chat template: chat_template.jinja, else the entry of tokenizer_config.json (the one named default of a list)."""
    source, where = config.get("chat_template"), "tokenizer_config.json"
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if os.path.isfile(os.path.join(path, "chat_template.jinja")):
        where = "chat_template.jinja"
        try:
            with open(os.path.join(path, where), encoding="utf-8") as file:
                source = file.read()
        except UnicodeDecodeError as error:
            raise UserError(f"{os.path.join(path, where)} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if not source:
        return None
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError(f"the chat template of {path!r} needs the package jinja2; install it with pip install jinja2") from error
    # The settings templates are written for: those of transformers.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # A block that is always taken stands for it, so that white-space control stays as written.
    source = _GENERATION_TAG.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"{os.path.join(path, where)}: the chat template is not valid ({error}); mend it") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _token_text(token: Any) -> str:
    """Special tokens are written as text or as an object with `content`."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def _generation_stop_ids(path: str) -> list[int]:
    """End ids of generation_config.json; Qwen and Llama list several."""
    listed = _read_json(path, "generation_config.json").get("eos_token_id")
    return [token for token in (listed if isinstance(listed, list) else [listed]) if isinstance(token, int)]


def _read_json(path: str, name: str) -> dict[str, Any]:
    file = os.path.join(path, name)
    if not os.path.isfile(file):
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            value = json.load(stream)
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); mend or remove it") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object; mend or remove it")
    return value
