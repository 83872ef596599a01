"""Pass rate of a policy on a split of its task, with a confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from trace_jax.errors import UserError
from trace_jax.evaluation.answers import scored_answers
from trace_jax.evaluation.precisions import rollout_name
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.prompts import SamplingSettings
from trace_jax.rollout.trajectories import FinishReason
from trace_jax.tasks import Task
from trace_jax.tokenizers import Tokenizer

FIRST_SAMPLE = 1 << 48
"""Sample ids of evaluations start here, apart from those of training."""

Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True)
class PassRate:
    """Result of an evaluation.

    Args:
      pass_at_1: share of correct answers among those that could be verified, averaged over prompts.
      low, high: 95 % confidence interval of `pass_at_1`.
      reward_mean: mean reward.
      prompts, samples: how many prompts and answers per prompt.
      response_length_mean: sampled tokens per answer.
      truncated_fraction: share of answers cut at the limit.
      verifier_errors: answers without a verdict; left out of every mean.
      precision: of the rollout, as the engine executes it.
    """

    pass_at_1: float
    low: float
    high: float
    reward_mean: float
    prompts: int
    samples: int
    response_length_mean: float
    truncated_fraction: float
    verifier_errors: int
    precision: str


def measure_pass_rate(
    engine: Engine,
    task: Task,
    tokenizer: Tokenizer,
    settings: SamplingSettings,
    *,
    split: str,
    samples: int,
    max_prompts: int | None,
    seed: int,
) -> PassRate:
    """Generates `samples` answers to the first `max_prompts` rows of a split and verifies them."""
    rows = task.rows(split)[:max_prompts]
    if not rows:
        raise UserError(f"split {split!r} of the task has no rows; name another split or enlarge the task")
    scored = scored_answers(engine, rows, task, tokenizer, settings, group_size=samples, first_sample=FIRST_SAMPLE, seed=seed)
    trajectories, verified = scored.trajectories, ~np.isnan(scored.reward)
    rate, low, high = pass_interval(scored.correct, verified, trajectories.group)
    return PassRate(
        pass_at_1=rate,
        low=low,
        high=high,
        reward_mean=float(np.nanmean(scored.reward)) if verified.any() else math.nan,
        prompts=len(rows),
        samples=samples,
        response_length_mean=float(trajectories.sampled_lengths().mean()),
        truncated_fraction=float(np.mean(trajectories.finish_reason == FinishReason.LENGTH)),
        verifier_errors=scored.verifier_errors,
        precision=rollout_name(engine.capabilities()),
    )


def pass_interval(
    correct: Bool[np.ndarray, " B"], verified: Bool[np.ndarray, " B"], group: Int64[np.ndarray, " B"]
) -> tuple[float, float, float]:
    """Mean pass rate over prompts and its 95 % interval; NaN if nothing was verified.

    Answers to one prompt are not independent, so the interval is Wilson's with the effective number of answers, as for
    clustered samples (Korn & Graubard 1998, Survey Methodology 24, 193-201): so many independent answers have a mean that varies as
    much as the mean over these prompts. It lies between the number of prompts (answers to a prompt are all alike) and of answers.
    Where all or no answers are right nothing shows how alike they are, and it is the number of prompts.

    Args:
      correct: whether an answer is right.
      verified: whether it has a verdict; the others are left out.
      group: the prompt it belongs to.
    """
    _, prompt = np.unique(group[verified], return_inverse=True)
    if not prompt.size:
        return math.nan, math.nan, math.nan
    answers = np.bincount(prompt)
    means = np.bincount(prompt, weights=correct[verified]) / answers
    prompts, rate = means.size, float(means.mean())
    variance, effective = rate * (1 - rate), float(prompts)
    if prompts > 1 and variance > 0:
        between = float(np.clip(means.var(ddof=1), variance * prompts / prompt.size, variance))
        effective = prompts * variance / between
    return rate, *wilson(rate, effective)


def wilson(rate: float, n: float) -> tuple[float, float]:
    """95 % score interval of a rate among n independent answers (Wilson 1927), which behaves near 0 and 1."""
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)  # rounding can lead just beyond


def effective_answers(rate: float, low: float, high: float) -> float:
    """How many independent answers a score interval stands for: the inverse of `wilson`; infinite for an interval of no width."""
    # Its ends are the roots of (rate - x)^2 = a x (1 - x) with a = Z^2 / n, so their product is rate^2 / (1 + a), and mirrored.
    square, product = (rate**2, low * high) if rate >= 0.5 else ((1 - rate) ** 2, (1 - low) * (1 - high))
    return Z * Z * product / (square - product) if square > product else math.inf
