"""Pass rate of a policy on a split of its task, with a confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from trace_jax.errors import UserError
from trace_jax.rollout.engine import Engine, generate
from trace_jax.rollout.prompts import SamplingSettings, make_requests, score
from trace_jax.rollout.trajectories import FinishReason
from trace_jax.tasks import Task
from trace_jax.tokenizers import Tokenizer

FIRST_SAMPLE = 1 << 48
"""Sample ids of evaluations start here, apart from those of training."""


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
    requests = make_requests(rows, tokenizer, settings, group_size=samples, first_sample=FIRST_SAMPLE, seed=seed)
    trajectories = generate(engine, requests)
    scored = score(trajectories, [row for row in rows for _ in range(samples)], task, tokenizer)
    correct = scored.correct.reshape(len(rows), samples)
    verified = ~np.isnan(scored.reward).reshape(len(rows), samples)
    rate, low, high = pass_interval(correct, verified)
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
    )


def pass_interval(correct: Bool[np.ndarray, "P S"], verified: Bool[np.ndarray, "P S"]) -> tuple[float, float, float]:
    """Mean pass rate over prompts and its 95 % interval.

    With one answer per prompt the interval is Wilson's (Wilson 1927), which behaves near 0 and 1. With several, answers to
    one prompt are not independent, so the interval is normal over the prompts' means, cut to [0, 1].
    """
    counted = verified.any(axis=1)
    if not counted.any():
        return math.nan, math.nan, math.nan
    means = (correct & verified).sum(axis=1)[counted] / verified.sum(axis=1)[counted]
    n, rate, z = means.size, float(means.mean()), 1.959964
    if correct.shape[1] == 1:
        centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
        return rate, max(0.0, centre - half), min(1.0, centre + half)  # rounding can lead just beyond
    error = z * float(means.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return rate, max(0.0, rate - error), min(1.0, rate + error)
