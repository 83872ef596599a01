"""Raw rows from any source become the rows of the three splits: pattern, template, duplicates, split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trace_jax.errors import UserError
from trace_jax.tasks.row import SPLITS, Message, Row, Split, question_hash

PLACEHOLDER = "{question}"


@dataclass(frozen=True)
class RawRow:
    """A question as its source gives it, before pattern and template.

    Args:
      where: place in the source, for messages ("data.jsonl line 3").
      question: text; of a conversation, its last user message.
      split: the split the source asks for, None to let the hash decide.
      history: messages before the last one, None for a plain question.
      answer, solution, meta: as in `Row`.
    """

    where: str
    question: str
    answer: str
    solution: str | None = None
    split: Split | None = None
    history: tuple[Message, ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptForm:
    """How a raw question becomes a prompt: an optional pattern whose group 1 replaces it, then a template around it."""

    template: str
    pattern: re.Pattern[str] | None

    @classmethod
    def parse(cls, template: str, pattern: str | None) -> PromptForm:
        """Checked form.

        Raises:
          UserError: template without `{question}`, invalid pattern, pattern without a group.
        """
        if PLACEHOLDER not in template:
            raise UserError(f"task.prompt_template {template!r} does not contain {PLACEHOLDER}; write it where the question goes")
        if pattern is None:
            return cls(template, None)
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"task.question_pattern {pattern!r} is not a regular expression ({error}); mend the pattern") from error
        if compiled.groups < 1:
            raise UserError(f"task.question_pattern {pattern!r} has no group; put the part to keep in parentheses")
        return cls(template, compiled)

    def strip(self, row: RawRow) -> str:
        """The question's variable part, the text that its hash is taken of."""
        if self.pattern is None:
            return row.question
        match = self.pattern.search(row.question)
        if match is None or not match.group(1):
            raise UserError(
                f"{row.where}: task.question_pattern {self.pattern.pattern!r} finds nothing in {shorten(row.question)!r}; mend the pattern"
            )
        return match.group(1)

    def render(self, question: str) -> str:
        """The question inside the template."""
        return self.template.replace(PLACEHOLDER, question)


def shorten(text: str, limit: int = 80) -> str:
    """Text cut for an error message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def split_rows(raw_rows: Iterable[RawRow], form: PromptForm, reserved: Collection[Split] = ()) -> tuple[dict[Split, list[Row]], int]:
    """The rows of each split, in source order, and how many duplicates were dropped.

    A question stands once and in one split. Of equal rows the first stays, unless a later one names its split; a row that
    names none goes where its hash says.

    Args:
      raw_rows: rows of the source.
      form: pattern and template.
      reserved: splits that take rows by name only; what hashes there goes to train.

    Raises:
      UserError: one question in two explicit splits, or a pattern that makes different questions the same.
    """
    chosen: dict[tuple[Any, ...], tuple[RawRow, str]] = {}
    duplicates = 0
    for row in raw_rows:
        text = form.strip(row)
        key = (text, *(tuple(sorted(message.items())) for message in row.history or ()))
        if key not in chosen:
            chosen[key] = (row, text)
            continue
        duplicates += 1
        first = chosen[key][0]
        if form.pattern is not None and first.question != row.question and first.answer != row.answer:
            raise UserError(
                f"{row.where}: task.question_pattern {form.pattern.pattern!r} makes it equal to {first.where} though the answers differ "
                f"({shorten(text)!r}); keep more of the question"
            )
        if first.split is None and row.split is not None:
            chosen[key] = (row, text)
        elif None not in (first.split, row.split) and first.split != row.split:
            raise UserError(f"{row.where}: the question already stands in split {first.split!r} at {first.where}; remove one of the two")
    splits: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    for key, (row, text) in chosen.items():
        hashed = text if len(key) == 1 else repr(key)
        prompt_id, split = question_hash(hashed)
        split = row.split or ("train" if split in reserved else split)
        prompt = form.render(text)
        history = row.history
        splits[split].append(
            Row(
                prompt_id=prompt_id,
                question=prompt if history is None else "\n\n".join([*(message["content"] for message in history), prompt]),
                answer=row.answer,
                meta=row.meta,
                solution=row.solution,
                messages=None if history is None else (*history, {"role": "user", "content": prompt}),
            )
        )
    return splits, duplicates
