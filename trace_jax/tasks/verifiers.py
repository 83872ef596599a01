"""The functions a verifier worker runs, made from a description that crosses the process border."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trace_jax.tasks.answers import tagged_answer
from trace_jax.tasks.importing import import_callable
from trace_jax.tasks.math_verifier import math_verifier
from trace_jax.tasks.rewards import verdict_of
from trace_jax.tasks.row import Row, Verdict

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
        return math_verifier()
    if spec.name == "reasoning_gym":
        return _reasoning_gym_verifier(spec)
    function = import_callable(spec.name, "task.reward")
    return lambda completion, row: verdict_of(function(completion, row.answer, row))


def _reasoning_gym_verifier(spec: VerifierSpec) -> Verifier:
    from trace_jax.tasks.procedural import reasoning_gym_data

    data = reasoning_gym_data(spec.dataset, spec.params, 0)

    def verify(completion: str, row: Row) -> Verdict:
        tagged = tagged_answer(completion)
        answer = completion.strip() if tagged is None else tagged
        return verdict_of(data.score_answer(answer=answer, entry=row.meta["entry"]))

    return verify
