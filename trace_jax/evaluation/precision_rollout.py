"""Answers of a policy at one precision, every one with its full record: what `mismatch` compares the trainer with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.config import Config
from trace_jax.errors import UserError
from trace_jax.evaluation.open_policy import OpenPolicy, precision_config
from trace_jax.evaluation.pass_rate import FIRST_SAMPLE, pass_interval
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.rollout.engine import generate
from trace_jax.rollout.prompts import make_requests, score
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.setup import sync_weights


@dataclass(frozen=True)
class PrecisionRollout:
    """Answers of one precision, and how many are right.

    Args:
      precision: of weights, activations and KV cache.
      trajectories: scored, all with an audit record.
      max_length: no sequence is longer; the same at every precision, so that equal forwards have equal shapes.
      pass_at_1: rate, low and high end of its 95 % interval.
    """

    precision: str
    trajectories: Trajectories
    max_length: int
    pass_at_1: tuple[float, float, float]
    reward_mean: float


def roll_out(opened: OpenPolicy, precision: str, *, split: str, prompts: int, samples: int, seed: int) -> PrecisionRollout:
    """Generates answers at a precision, every sequence with its full record."""
    setup = opened.setup(precision_config(opened.config, precision, "naive"))
    engine = setup.engine()
    sync_weights(engine, setup, opened.params, opened.multipliers, 0)
    rows = setup.task.rows(split)[:prompts]
    requests = make_requests(
        rows,
        setup.tokenizer,
        setup.sampling,
        group_size=samples,
        first_sample=FIRST_SAMPLE,
        seed=seed,
        audited=len(rows) * samples,
    )
    scored = score(generate(engine, requests), [row for row in rows for _ in range(samples)], setup.task, setup.tokenizer)
    engine.close()
    return _scored(
        precision,
        scored.trajectories,
        max(request.tokens.size + request.max_new_tokens for request in requests),
        scored.correct.reshape(len(rows), samples),
        scored.reward.reshape(len(rows), samples),
    )


def cached_rollout(opened: OpenPolicy, directory: Path) -> PrecisionRollout:
    """Trajectories of a saved guidance cache, as a rollout of the precision that the stored config names.

    Raises:
      UserError: the cache holds nothing or lacks full records, or the config mixes precisions.
    """
    write_one = "write one with trace-jax rollout --save-cache"
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; {write_one}")
    precision = stored_precision(opened.config)
    store = GuidanceCache.open(directory)
    ids = store.keys()
    if not len(ids):
        raise UserError(f"{directory}: the guidance cache holds no sample; {write_one}")
    trajectories = store.get(ids)
    audited = 0 if trajectories.audit is None else trajectories.audit.sequences.size
    if audited < trajectories.num_sequences:
        raise UserError(f"{directory}: {audited} of {trajectories.num_sequences} samples have a full record; {write_one}")
    reward = trajectories.reward[:, None]
    return _scored(precision, trajectories, int(trajectories.lengths().max()), reward >= 1.0, reward)


def stored_precision(config: Config) -> str:
    """The one precision of the config's rollout.

    Raises:
      UserError: the config mixes precisions.
    """
    rollout = config.rollout
    formats = {rollout.weights, rollout.activations, rollout.kv_cache.k, rollout.kv_cache.v}
    if len(formats) != 1:
        raise UserError(f"the policy's config mixes the precisions {', '.join(sorted(formats))}; a cache is compared at one precision")
    return formats.pop()


def _scored(
    precision: str, trajectories: Trajectories, max_length: int, correct: Bool[np.ndarray, "P S"], reward: Float[np.ndarray, "P S"]
) -> PrecisionRollout:
    verified = ~np.isnan(reward)
    mean = float(np.nanmean(reward)) if verified.any() else float("nan")
    return PrecisionRollout(precision, trajectories, max_length, pass_interval(correct, verified), mean)
