"""Math answers compared with math-verify; runs in the verifier's worker only, because sympy can hang.

1. The final answer is cut out of the completion (`answers.py`), so that numbers elsewhere cannot match.
2. Gold answer and final answer are written the way math-verify's parser reads without guessing.
3. Equal text is equal. Else math-verify decides, except that a sum or product which was never worked out is no answer to a
   question whose gold answer is a number: the question itself ("12*34") would be one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from trace_jax.errors import UserError
from trace_jax.tasks.answers import final_answer, last_box, looks_like_math
from trace_jax.tasks.rewards import text_answer
from trace_jax.tasks.row import Row, Verdict

MAX_LENGTH = 1000
"""Characters of a final answer; longer ones (and longer than 4 gold answers) are wrong without a look."""

MAX_NESTING = 24
"""Depth of brackets in a final answer; the parser's time doubles with each level beyond some dozens."""

_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})")
_MIXED = re.compile(r"(-?)(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})")
_DIGIT_GAP = re.compile(r"(?<=\d)(?:\\[,;! ]|[\u00a0\u202f])(?=\d{3})|(?<=\d) (?=\d{3}(?: \d{3})*(?:\.\d+)?$)")
_SIGN = re.compile(r"^([+-])\s*(?=[\d.\\(])")


def math_verifier() -> Callable[[str, Row], Verdict]:
    """The verifier: score 1 or 0. An answer that cannot be parsed is wrong; a gold answer that cannot is compared as text.

    Raises:
      UserError: math-verify is missing.
    """
    try:
        import math_verify
    except ImportError as error:
        raise UserError("task.reward math needs the package math-verify; install it with pip install math-verify") from error
    # math-verify warns that its SIGALRM timeouts are off; the worker is killed from outside instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        return math_verify.parse(as_math(text), parsing_timeout=None)  # type: ignore[arg-type]

    def equal_math(gold_text: str, answer_text: str) -> bool:
        if len(answer_text) > max(MAX_LENGTH, 4 * len(gold_text)) or nesting(answer_text) > MAX_NESTING:
            return False
        gold, answer = parse(gold_text), parse(answer_text)
        if not (gold and answer) or _unworked(gold[0], answer[0]):
            return False
        return math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)

    def verify(completion: str, row: Row) -> Verdict:
        equal = text_answer(completion, row).correct or equal_math(row.answer, final_answer(completion))
        return Verdict(float(equal), equal)

    return verify


def as_math(answer: str) -> str:
    """An answer as math-verify's parser reads it: formulas in a box, so that they are taken whole; prose as it is."""
    box = last_box(answer)
    text = (answer if box is None else box).strip().replace("{,}", ",").replace("\u2212", "-").replace("**", "^")
    text = _DIGIT_GAP.sub("", text)
    text = _SIGN.sub(lambda match: match.group(1).strip("+"), text)
    scientific, mixed = _SCIENTIFIC.fullmatch(text), _MIXED.fullmatch(text)
    if scientific:
        text = f"{scientific.group(1)} \\cdot 10^{{{int(scientific.group(2))}}}"
    elif mixed and int(mixed.group(4)):
        sign, whole, top, bottom = mixed.group(1), *map(int, mixed.group(2, 3, 4))
        text = f"{sign}\\frac{{{whole * bottom + top}}}{{{bottom}}}"
    if text.startswith(("$", "\\(", "\\[")) and text.endswith(("$", "\\)", "\\]")):
        return text
    return f"\\boxed{{{text}}}" if box is not None or looks_like_math(text) or "\\" in text else text


def nesting(text: str) -> int:
    """Largest depth of open brackets of any kind."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _unworked(gold: Any, answer: Any) -> bool:
    """Whether the gold answer is a number and the answer a sum, or a product of plain numbers (percentages and powers are fine)."""
    if not getattr(gold, "is_Number", False):
        return False
    if getattr(answer, "is_Add", False):
        return True
    factors = answer.args if getattr(answer, "is_Mul", False) else ()
    percent = any(factor.is_Rational and factor.q == 100 and factor.p == 1 for factor in factors)
    return len(factors) > 1 and not percent and all(factor.is_Rational for factor in factors)
