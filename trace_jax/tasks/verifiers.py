"""The functions a verifier worker runs, made from a description that crosses the process border."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trace_jax.errors import UserError
from trace_jax.tasks.answers import final_answer, last_box
from trace_jax.tasks.importing import import_callable
from trace_jax.tasks.row import Row, Verdict
from trace_jax.tasks.rewards import verdict_of

Verifier: TypeAlias = Callable[[str, Row], Verdict]


@dataclass(frozen=True)
class VerifierSpec:
    """Which verifier a worker runs: "math", "reasoning_gym" (with `dataset` and `params`) or an import path."""

    name: str
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def built_in(self) -> bool:
        """Whether the code is this project's choice and not the user's."""
        return self.name in ("math", "reasoning_gym")


def make_verifier(spec: VerifierSpec) -> Verifier:
    """The verifier of a description; imports what it needs.

    Raises:
      UserError: a package or the function is missing.
    """
    if spec.name == "math":
        return _math_verifier()
    if spec.name == "reasoning_gym":
        return _reasoning_gym_verifier(spec)
    function = import_callable(spec.name, "task.reward")
    return lambda completion, row: verdict_of(function(completion, row.answer, row))


def _math_verifier() -> Verifier:
    try:
        import math_verify
    except ImportError as error:
        raise UserError("task.reward math needs the package math-verify; install trace-jax[tasks]") from error
    # math-verify warns that its SIGALRM timeouts are off; the worker is killed from outside instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def verify(completion: str, row: Row) -> Verdict:
        gold = parse(as_math(row.answer))
        if not gold:
            return Verdict.failed(f"math-verify cannot parse the gold answer {row.answer[:80]!r}")
        answer = parse(as_math(final_answer(completion)))
        equal = bool(answer) and math_verify.verify(gold, answer, timeout_seconds=None)
        return Verdict(float(equal), equal)

    return verify


def as_math(answer: str) -> str:
    """A final answer as math-verify's extraction expects it: LaTeX in a box, plain text as it is."""
    box = last_box(answer)
    answer = (answer if box is None else box).replace("{,}", ",").strip()
    delimited = answer.startswith(("$", "\\(", "\\["))
    return f"\\boxed{{{answer}}}" if "\\" in answer and not delimited else answer


def _reasoning_gym_verifier(spec: VerifierSpec) -> Verifier:
    from trace_jax.tasks.procedural import reasoning_gym_data

    data = reasoning_gym_data(spec.dataset, spec.params, 0)

    def verify(completion: str, row: Row) -> Verdict:
        from reasoning_gym.utils import extract_answer

        tagged = extract_answer(completion)
        answer = completion.strip() if tagged is None else tagged
        return verdict_of(data.score_answer(answer=answer, entry=row.meta["entry"]))

    return verify
