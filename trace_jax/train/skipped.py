"""Updates that are skipped because their gradient is not finite."""

from __future__ import annotations

import math

from trace_jax.errors import UserError

MAX_SKIPPED_IN_A_ROW = 3
"""Skipped updates before the run gives up."""


class Diverged(UserError):
    """A run that gave up because its gradients are no longer finite."""

    def __init__(self, step: int, remedy: str):
        super().__init__(f"step {step}: {MAX_SKIPPED_IN_A_ROW} gradients in a row were not finite; {remedy}")
        self.step = step


def count_skipped(in_a_row: int, grad_norm: float, step: int, remedy: str) -> int:
    """Updates skipped in a row, after one more update.

    Args:
      in_a_row: before this update.
      grad_norm: of this update.
      step: that this update belongs to.
      remedy: what to write or do instead, for the message.

    Raises:
      Diverged: too many in a row.
    """
    if math.isfinite(grad_norm):
        return 0
    if in_a_row + 1 >= MAX_SKIPPED_IN_A_ROW:
        raise Diverged(step, remedy)
    return in_a_row + 1
