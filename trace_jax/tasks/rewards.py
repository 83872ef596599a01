"""Reward functions: what a completion earns.

| name | score | where it runs |
|---|---|---|
| exact | 1 if equal up to white space | inline |
| char_match | 1 if equal up to white space, else half the share of characters in place | inline |
| math | 1 if math-verify finds the final answer equal to the gold one | worker |
| auto | math where the gold answer looks like mathematics, else exact on the whole or the marked answer | worker / inline |
| reasoning_gym | the data set's own score; solved means a score of 1 | worker |
| module:function | `f(completion, answer, row) -> float | bool | dict | Verdict` | worker |

What can hang runs in a killable worker process (`pool.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trace_jax.tasks.answers import marked_answer, normalise, without_text_command
from trace_jax.tasks.row import Row, Verdict

InlineReward: TypeAlias = Callable[[str, Row], Verdict]


def exact(completion: str, row: Row) -> Verdict:
    """1 if completion and answer are equal up to white space."""
    return _binary(normalise(completion) == normalise(row.answer))


def text_answer(completion: str, row: Row) -> Verdict:
    """1 if the whole completion or its marked final answer equals the gold answer up to white space."""
    gold = normalise(without_text_command(row.answer))
    candidates = (completion, marked_answer(completion))
    return _binary(any(normalise(without_text_command(text)) == gold for text in candidates if text is not None))


def char_match(completion: str, row: Row) -> Verdict:
    """1 if equal up to white space, else 0.5 x share of characters in place, over the longer of the two texts."""
    text, gold = normalise(completion), normalise(row.answer)
    if text == gold:
        return _binary(True)
    in_place = sum(a == b for a, b in zip(text, gold, strict=False))
    return Verdict(0.5 * in_place / max(len(text), len(gold)), False)


INLINE: dict[str, InlineReward] = {"exact": exact, "char_match": char_match}
"""Rewards that cannot hang."""

ISOLATED = ("math", "auto", "reasoning_gym")
"""Built-in rewards that need the worker."""


def verdict_of(result: Any) -> Verdict:
    """The verdict that a reward function's return value means.

    Args:
      result: a finite number (solved from 1.0 on), a bool, a Verdict, or a mapping with `score` and optional `correct` (or `acc`).

    Returns:
      The verdict; a failed one for anything else.
    """
    if isinstance(result, Verdict):
        return result
    correct = None
    if isinstance(result, Mapping):
        if "score" not in result:
            return Verdict.failed(f"the reward function returned a mapping without 'score', with {sorted(map(str, result))}")
        correct = result.get("correct", result.get("acc"))
        result = result["score"]
    try:
        score = float(result)
    except (TypeError, ValueError):
        return Verdict.failed(f"the reward function returned {type(result).__name__}, not a number")
    if not math.isfinite(score):
        return Verdict.failed(f"the reward function returned {score}")
    return Verdict(score, score >= 1.0 if correct is None else bool(correct))


def _binary(equal: bool) -> Verdict:
    return Verdict(float(equal), equal)
