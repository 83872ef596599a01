"""Text to token ids and back: byte, ASCII and Hugging Face tokenizers behind one protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from trace_jax.errors import UserError

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A question, or a conversation of messages with `role` and `content`."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer.

    Attributes:
      name: the spec it was loaded from.
      vocab_size: ids are below it.
      bos_id: id that begins a sequence, None where the model has none.
      eos_id: id that ends an answer.
      pad_id: id for padding; it may equal `eos_id`, so padding is told by a mask and never by the id.
      stop_ids: drawing one of them ends an answer.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids are dropped, incomplete UTF-8 becomes U+FFFD. Never raises for ids of the vocabulary."""
        ...

    def apply_prompt(self, question: Prompt) -> list[int]:
        """Ids after which the answer begins."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a config.

    Args:
      spec: "byte", "ascii", or a directory with Hugging Face tokenizer files.

    Raises:
      UserError: no such directory, or no usable tokenizer in it.
    """
    if spec in ("byte", "ascii"):
        return CodeUnitTokenizer(spec, 256 if spec == "byte" else 128)
    return _load_hf(spec)


@dataclass(frozen=True)
class CodeUnitTokenizer:
    """One id per UTF-8 byte ("byte", 256 of them) or ASCII character ("ascii", 128), then bos, eos and pad."""

    name: str
    units: int

    @property
    def vocab_size(self) -> int:
        """Code units and three specials."""
        return self.units + 3

    @property
    def bos_id(self) -> int:
        """First id of every prompt."""
        return self.units

    @property
    def eos_id(self) -> int:
        """Ends an answer."""
        return self.units + 1

    @property
    def pad_id(self) -> int:
        """Padding."""
        return self.units + 2

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of an answer only."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; "ascii" refuses other characters with a UserError that names the first one."""
        if self.units == 128 and not text.isascii():
            place, character = next((i, c) for i, c in enumerate(text) if not c.isascii())
            raise UserError(
                f"tokenizer ascii cannot encode {character!r} (U+{ord(character):04X}) at character {place} of {text[:60]!r}; "
                "write tokenizer: byte, or keep the task's text ASCII"
            )
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without specials; broken UTF-8 becomes U+FFFD."""
        return bytes(int(token) for token in ids if 0 <= token < self.units).decode("utf-8", "replace")

    def apply_prompt(self, question: Prompt) -> list[int]:
        """bos, the question, a newline; messages are written one a line."""
        text = question if isinstance(question, str) else "\n".join(message["content"] for message in question)
        return [self.bos_id, *self.encode(text + "\n")]


@dataclass(frozen=True)
class HFTokenizer:
    """A Hugging Face tokenizer; `tokenizer` is a transformers PreTrainedTokenizerFast."""

    name: str
    tokenizer: Any
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids without special ids; text that looks like a special token is encoded as ordinary text where the backend can."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special ids."""
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def apply_prompt(self, question: Prompt) -> list[int]:
        """The chat template with the generation prompt; without a template bos (if any), the text and a newline."""
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(message) for message in question]
            return self.render(messages, add_generation_prompt=True)
        text = question if isinstance(question, str) else "\n".join(message["content"] for message in question)
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text + "\n")]

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> list[int]:
        """Ids of a conversation under the chat template.

        Raises:
          UserError: the template refuses the conversation.
        """
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            # Templates raise jinja errors of many types, among them deliberate ones ("system role not supported").
            raise UserError(f"tokenizer {self.name}: its chat template refuses the prompt ({error}); change the messages or the template") from error
        return self.encode(text)


def _load_hf(spec: str) -> HFTokenizer:
    if not os.path.isdir(spec):
        raise UserError(f"tokenizer {spec!r} is not a directory; write byte, ascii or a directory with Hugging Face tokenizer files")
    if not any(os.path.exists(os.path.join(spec, file)) for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")):
        raise UserError(f"tokenizer directory {spec!r} has no tokenizer.json; save the tokenizer there with save_pretrained")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(f"tokenizer {spec!r} needs the package transformers; install trace-jax[hf]") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec, local_files_only=True)
    except Exception as error:
        # The loaders raise whatever a broken file makes them trip over.
        raise UserError(f"tokenizer directory {spec!r} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]})") from error
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(f"tokenizer directory {spec!r} names no eos_token; add it to tokenizer_config.json, answers could not end")
    pad = tokenizer.pad_token_id
    return HFTokenizer(
        name=spec,
        tokenizer=tokenizer,
        vocab_size=max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1),
        bos_id=tokenizer.bos_token_id,
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        stop_ids=_stop_ids(spec, eos),
    )


def _stop_ids(spec: str, eos: int) -> tuple[int, ...]:
    """eos and the further end ids of generation_config.json (Qwen and Llama list several)."""
    path = os.path.join(spec, "generation_config.json")
    if not os.path.exists(path):
        return (eos,)
    import json

    try:
        with open(path, encoding="utf-8") as file:
            listed = json.load(file).get("eos_token_id", [])
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); mend or remove it") from error
    more = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys([eos, *(token for token in more if isinstance(token, int))]))
