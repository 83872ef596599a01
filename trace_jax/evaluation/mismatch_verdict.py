"""Is it safe to move this model to a precision? Two questions with stated limits, and one plain answer.

1. Does the rounded model still solve the task: is its pass rate significantly below that of BF16?
2. Do trainer and rollout agree: how wide is their gap with each method?

A rounded model that no longer solves the task is no, however well the trainer agrees with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from trace_jax.evaluation.pass_rate import wilson
from trace_jax.evaluation.precisions import METHODS_OF

SMALL, RISKY = 1.02, 1.05
"""Limits on `token_mult_prob_error`, mean(exp |gap|): at most SMALL is small; NeMo RL's gate is 1.05, above it is large."""

GapSize = Literal["small", "risky", "large"]
Verdict = Literal["yes", "risky", "no", "unknown"]


def gap_size(token_mult_prob_error: float) -> GapSize:
    """The gap of trainer and rollout, from mean(exp |gap|)."""
    if not np.isfinite(token_mult_prob_error):
        return "large"
    return "small" if token_mult_prob_error <= SMALL else "risky" if token_mult_prob_error <= RISKY else "large"


def judge(
    precision: str, entry: Mapping[str, Any], reference: Mapping[str, Any] | None, overrides: str = "", known: Sequence[str] | None = None
) -> dict[str, str]:
    """The verdict on a precision below BF16, and the answer in a line.

    Args:
      entry: the precision's part of the report: `prompts`, `pass_at_1` with `_low` and `_high`, and `methods`.
      reference: the same of `bf16`; None if it was not measured.
      overrides: settings that bring the config to the precision; empty if it is the config's own.
      known: methods that make sense for the config (`methods_of`); None takes all of the precision.

    Returns:
      `verdict`: `yes` if a method of small gap exists, `risky` if only a risky one does, `no` if neither does or the pass rate
      is significantly lower, and `unknown` if the pass rate cannot be judged. `answer`: the line.
    """
    methods = {name: result["gap"] for name, result in entry["methods"].items()}
    unjudged = _unjudged(entry, reference)
    if reference is None or unjudged:
        return {
            "verdict": "unknown",
            "answer": f"{precision}: cannot be judged, {unjudged}. Gap: {_by_gap(methods, 'small', 'risky', 'large')}.",
        }
    rates = f"pass@1 {entry['pass_at_1']:.3f} against bf16's {reference['pass_at_1']:.3f}"
    if entry["pass_at_1_high"] < reference["pass_at_1_low"]:
        return {"verdict": "no", "answer": f"{precision}: no, with any method: {rates} is a loss. Next: keep the rollout in bf16."}
    best: Verdict = "yes" if "small" in methods.values() else "risky" if "risky" in methods.values() else "no"
    found = f"{_by_gap(methods, 'yes', 'risky', 'no')} ({rates})"
    return {
        "verdict": best,
        "answer": f"{precision}: {found}. Next: {_step(precision, known or METHODS_OF[precision], methods, overrides)}.",
    }


def _unjudged(entry: Mapping[str, Any], reference: Mapping[str, Any] | None) -> str | None:
    """Why the pass rate cannot be compared with BF16's, or None."""
    if reference is None:
        return "bf16 was not measured; measure it too: no --cache, and bf16 among --precisions"
    if not np.isfinite([entry["pass_at_1"], reference["pass_at_1"]]).all():
        return "no answer could be verified"
    # Where even a model that solves nothing would overlap BF16's interval, an overlap says nothing.
    if reference["pass_at_1_low"] <= wilson(0.0, entry["prompts"])[1]:
        return f"bf16's pass@1 {reference['pass_at_1']:.3f} is too uncertain to show a loss; raise --max-prompts, or train the model first"
    return None


def _step(precision: str, known: Sequence[str], methods: Mapping[str, GapSize], overrides: str) -> str:
    """What to do next where the pass rate is no loss."""
    order = METHODS_OF[precision]
    small = [name for name in order if methods.get(name) == "small"]
    if small:
        return f"train with method={small[0]} {overrides}".rstrip()
    closer = [name for name in order[1 + max(order.index(name) for name in methods) :] if name in known]
    measure = f"measure what follows the rollout more closely (--methods {','.join(closer)}), or " if closer else ""
    return f"{measure}keep the rollout in bf16"


def _by_gap(methods: Mapping[str, GapSize], *words: str) -> str:
    """The methods by the size of their gap: `yes with trace or trace_full; no with naive`."""
    sizes: Sequence[GapSize] = ("small", "risky", "large")
    grouped = {word: [name for name, gap in methods.items() if gap == size] for word, size in zip(words, sizes, strict=True)}
    return "; ".join(f"{word} with {' or '.join(names)}" for word, names in grouped.items() if names)
