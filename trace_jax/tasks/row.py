"""What a task is made of: a row (question and answer) and a verdict on one completion; plus the split of a question.

Standard library only: the verifier's worker process imports this file, and it must start fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Split: TypeAlias = Literal["train", "validation", "test"]
Message: TypeAlias = Mapping[str, str]
"""One chat message: `role` (system, user or assistant) and `content`."""

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

TIMEOUT = "timeout"
"""The error of a verdict whose verifier was cut off."""


@dataclass(frozen=True)
class Row:
    """One question of a task.

    Args:
      prompt_id: stable 64-bit hash of the question before the prompt template, the same in every run and process.
      question: the prompt as plain text, template applied.
      answer: the answer the verifier compares with; empty where the source scores without one.
      meta: what else the source knows about the question; reward functions may use it.
      solution: worked answer to train on, None where it is the answer itself.
      messages: the prompt as a conversation, None for a plain question.
    """

    prompt_id: int
    question: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    solution: str | None = None
    messages: tuple[Message, ...] | None = None

    @property
    def prompt(self) -> str | Sequence[Message]:
        """What `Tokenizer.apply_prompt` takes: the conversation if there is one, else the question."""
        return self.question if self.messages is None else self.messages

    @property
    def worked_answer(self) -> str:
        """The text a supervised cold start learns: the solution if there is one, else the answer."""
        return self.answer if self.solution is None else self.solution


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one completion.

    Args:
      score: reward; 0.0 where `error` is set, and then it means nothing.
      correct: whether the answer counts as solved in a pass rate.
      error: why there is no verdict (`TIMEOUT`, an exception's text, ...). Such a completion is not a wrong answer: leave it
        out of rewards and pass rates and count it.
    """

    score: float
    correct: bool
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> Verdict:
        """No verdict, for the reason given."""
        return cls(0.0, False, error)


def question_hash(text: str) -> tuple[int, Split]:
    """Prompt id (first 8 bytes of the SHA-256 of the UTF-8 text) and split (80/10/10 by the next 8 bytes) of a question."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    share = int.from_bytes(digest[8:16], "little") % 10
    split: Split = "train" if share < 8 else "validation" if share == 8 else "test"
    return int.from_bytes(digest[:8], "little"), split
