"""Watches a reward at work: shows its first error, and stops a run in which nothing can be verified."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trace_jax.errors import UserError
from trace_jax.tasks.row import TIMEOUT, Row, Verdict
from trace_jax.tasks.source import shorten

MAX_FAILED_BATCHES = 3
"""Batches in a row without a single verdict before the run gives up; the first batch of a run must have one at once."""


class RewardHealth:
    """What is known about a reward from the batches it has judged.

    Args:
      reward: name of the reward, or an import path.
      timeout_s: seconds after which its verifier is cut off.
    """

    def __init__(self, reward: str, timeout_s: float):
        self._reward, self._timeout_s = reward, timeout_s
        self._shown = False
        self._has_worked = False
        self._failed_batches = 0

    def observe(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
        """Takes note of the verdicts on one batch. The first error of all is shown on stderr; the caller counts the rest.

        Raises:
          UserError: no answer of the first batch, or of `MAX_FAILED_BATCHES` batches in a row, has a verdict.
        """
        errors = [(row, verdict.error) for row, verdict in zip(rows, verdicts, strict=True) if verdict.error is not None]
        if len(errors) < len(verdicts):
            self._has_worked, self._failed_batches = True, 0
        elif errors:
            self._failed_batches += 1
        if not errors:
            return
        row, error = errors[0]
        place = f"on the prompt {_one_line(row.question)!r}: {self._reason(error)}"
        if self._failed_batches and (not self._has_worked or self._failed_batches >= MAX_FAILED_BATCHES):
            batches = f"{self._failed_batches} batches in a row" if self._has_worked else "the first batch"
            raise UserError(f"task.reward {self._reward} has no verdict on any answer of {batches}; {place}; {self._remedy(error)}")
        if not self._shown:
            self._shown = True
            note = "such answers have no reward; their number is in reward/verifier_errors, and no further error is shown"
            print(f"warning: task.reward {self._reward} failed {place}; {note}", file=sys.stderr, flush=True)

    def _reason(self, error: str) -> str:
        return f"cut off after {self._timeout_s:g} seconds" if error == TIMEOUT else _one_line(error, 300)

    def _remedy(self, error: str) -> str:
        return "make it faster or raise task.verifier_timeout_s" if error == TIMEOUT else "mend it or choose another task.reward"


def _one_line(text: str, limit: int = 60) -> str:
    return shorten(" ".join(text.split()), limit)
