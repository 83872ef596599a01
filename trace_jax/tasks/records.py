"""Rows from records: JSON lines and the mappings a user's function returns, in the forms of the field.

| form | question | answer |
|---|---|---|
| plain | `question`, `prompt` or `problem` | `answer`, `solution`, `target`, `label` or `ground_truth` |
| GSM8K | `question` | `answer` whose last line is `#### n`: n is the answer, the whole is the worked answer |
| verl | `prompt: [{role, content}, ...]` | `reward_model: {ground_truth}` |

Besides: `split` (train, validation or test) decides the split; every other field goes to `meta`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trace_jax.errors import UserError
from trace_jax.tasks.answers import gold_of_worked_answer
from trace_jax.tasks.row import Message, Split
from trace_jax.tasks.source import RawRow

PREFIX = "jsonl:"
QUESTION_KEYS = ("question", "prompt", "problem")
ANSWER_KEYS = ("answer", "target", "label", "ground_truth", "solution")
_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def jsonl_rows(path: str, split: Split | None = None) -> Iterator[RawRow]:
    """Rows of a JSON-lines file; empty lines are skipped.

    Args:
      path: file.
      split: split of rows that name none, None to let the hash decide.

    Raises:
      UserError: missing or empty file, bad JSON, a row of no known form; with the line.
    """
    try:
        file = open(path, "rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"task file {path!r} cannot be read ({reason}); write {PREFIX}FILE with a JSON-lines file") from error
    found = False
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            found = True
            where = f"{path} line {number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 text (byte {error.start}); write one JSON object a line") from error
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error}); write one JSON object a line") from error
            yield record_row(record, where, split)
    if not found:
        raise UserError(f"task file {path!r} has no rows; write one JSON object a line")


def record_row(record: Any, where: str, split: Split | None = None) -> RawRow:
    """The row of one record.

    Raises:
      UserError: not a mapping, no known question or answer key, wrong types, unknown split name.
    """
    if not isinstance(record, Mapping):
        raise UserError(f'{where} is a {type(record).__name__}, not an object; write {{"question": ..., "answer": ...}}')
    question_key = next((key for key in QUESTION_KEYS if key in record), None)
    if question_key is None:
        raise UserError(f"{where} has no question among its keys ({_keys(record)}); name it {', '.join(QUESTION_KEYS)}")
    question, history = _question(record[question_key], f"{where}: {question_key}")
    answer, solution = _answer(record, where)
    named = record.get("split")
    if named is not None:
        if not isinstance(named, str) or named not in _SPLIT_NAMES:
            raise UserError(f"{where}: split is {named!r}; write train, validation or test")
        split = _SPLIT_NAMES[named]
    used = {question_key, "split"}
    return RawRow(where, question, answer, solution, split, history, {key: value for key, value in record.items() if key not in used})


def _question(value: Any, where: str) -> tuple[str, tuple[Message, ...] | None]:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where} is empty; remove the row or write the question")
        return value, None
    messages = value if isinstance(value, list) else []
    good = [m for m in messages if isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)]
    if not messages or len(good) != len(messages):
        raise UserError(f"{where} is neither text nor a list of messages with role and content; write one of the two")
    if good[-1]["role"] != "user":
        raise UserError(f"{where} ends with a {good[-1]['role']!r} message; the last one must be the user's")
    history = tuple({"role": m["role"], "content": m["content"]} for m in good[:-1])
    return good[-1]["content"], history


def _answer(record: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    """Gold answer and worked answer."""
    if "reward_model" in record:
        model = record["reward_model"]
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise UserError(f'{where}: reward_model has no ground_truth; write {{"ground_truth": ...}}')
        key, value = "reward_model.ground_truth", model["ground_truth"]
    else:
        key = next((name for name in ANSWER_KEYS if name in record), "")
        if not key:
            known = ", ".join((*ANSWER_KEYS, "reward_model.ground_truth"))
            raise UserError(f"{where} has no answer among its keys ({_keys(record)}); name it {known}")
        value = record[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {key} is a {type(value).__name__}; write text or a number")
    text = str(value).strip()
    worked = record.get("solution") if key != "solution" and isinstance(record.get("solution"), str) else None
    if "####" in text or key == "solution":
        gold = gold_of_worked_answer(text)
        if gold is not None:
            text, worked = gold, worked or text
    if not text:
        raise UserError(f"{where}: {key} is empty; remove the row or write the answer")
    return text, worked


def _keys(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"
