"""Text to token ids and back: byte, ASCII and Hugging Face tokenizers behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from trace_jax.errors import UserError

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A question, or a conversation of messages with `role` and `content`."""

BUILT_IN = ("byte", "ascii")
"""Tokenizers that need no files; every other spec is a directory."""


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

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

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
      spec: "byte", "ascii", or a directory with a Hugging Face tokenizer.json.

    Raises:
      UserError: no such directory, or no usable tokenizer in it.
    """
    if spec in BUILT_IN:
        return CodeUnitTokenizer(spec, 256 if spec == "byte" else 128)
    from trace_jax.hf_tokenizer import load_hf_tokenizer

    return load_hf_tokenizer(spec)


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


def prefix_problems(tokenizer: Tokenizer) -> list[str]:
    """Why a second turn's prompt, rendered anew, does not continue the first turn's ids; empty if it does.

    Renders two turns with and without a system message and with a `<think>` block in the first answer (pitfalls TOK-02, -04,
    -05). With problems, a conversation of several turns must be built by concatenating ids, never by rendering it again.
    """
    problems = []
    for system in (False, True):
        for answer in ("One.", "<think>\nHm.\n</think>\n\nOne."):
            case = f"{'with' if system else 'without'} a system message, {'with' if 'think' in answer else 'without'} a think block"
            first = [*([{"role": "system", "content": "Be brief."}] if system else []), {"role": "user", "content": "Count."}]
            second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
            try:
                prompt, continued = tokenizer.apply_prompt(first), tokenizer.apply_prompt(second)
            except UserError:
                if not system:
                    raise
                continue  # a template may refuse system messages; then no conversation has one
            turn = [*prompt, *tokenizer.encode(answer)]
            if continued[: len(prompt)] != prompt:
                problems.append(f"{case}: the first prompt is rendered differently once a turn follows")
            elif continued[: len(turn)] != turn:
                problems.append(f"{case}: the first answer is rendered differently once a turn follows")
            elif continued[len(turn)] not in tokenizer.stop_ids:
                problems.append(f"{case}: no stop id follows the first answer")
    return problems
