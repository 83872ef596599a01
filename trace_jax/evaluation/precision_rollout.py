"""Answers of a policy at one precision, every one with its full record: what `mismatch` compares the trainer with."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_jax.config import Config
from trace_jax.errors import UserError
from trace_jax.evaluation.answers import scored_answers
from trace_jax.evaluation.cache_origin import WRITE_ONE, read_origin, require_same, rollout_identity
from trace_jax.evaluation.open_policy import OpenPolicy
from trace_jax.evaluation.pass_rate import FIRST_SAMPLE, pass_interval
from trace_jax.evaluation.precisions import precision_config, precision_name
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.rollout.weight_update import UpdateDigest
from trace_jax.train.setup import sync_weights


class NotExecuted(UserError):
    """The engine does not execute the precision."""


@dataclass(frozen=True)
class PrecisionRollout:
    """Answers of one precision, and how many are right.

    Args:
      precision: of weights, activations and KV cache.
      trajectories: scored, all with an audit record.
      max_length: no sequence is longer; the same at every precision, so that equal forwards have equal shapes.
      prompts: prompts with a verified answer.
      pass_at_1: rate over them, low and high end of its 95 % interval.
      residual_fraction: share of the experts' input channels that were compensated.
    """

    precision: str
    trajectories: Trajectories
    max_length: int
    prompts: int
    pass_at_1: tuple[float, float, float]
    reward_mean: float
    residual_fraction: float


def roll_out(opened: OpenPolicy, precision: str, *, split: str, prompts: int, samples: int, seed: int) -> PrecisionRollout:
    """Generates answers at a precision, every sequence with its full record.

    Raises:
      NotExecuted: the engine executes something else than the precision.
    """
    config = precision_config(opened.config, precision, "naive")
    return roll_out_config(opened, config, split=split, prompts=prompts, samples=samples, seed=seed, precision=precision)


def roll_out_config(
    opened: OpenPolicy, config: Config, *, split: str, prompts: int, samples: int, seed: int, precision: str | None = None
) -> PrecisionRollout:
    """Generates answers with a config's rollout, every sequence with its full record.

    Args:
      precision: what the engine must execute; None takes what it does.

    Raises:
      NotExecuted: the engine executes something else than the precision.
    """
    setup = opened.setup(config)
    rows = setup.task.rows(split)[:prompts]
    with closing(setup.engine()) as engine:
        sync_weights(engine, setup, opened.params, opened.multipliers, 0)
        told = engine.capabilities()
        executed = precision_name(told)
        if precision not in (None, executed):
            raise NotExecuted(
                f"{precision} cannot be measured: engine {setup.config.rollout.engine} executes {executed}; "
                f"leave {precision} out of --precisions, or choose another rollout.engine"
            )
        scored = scored_answers(
            engine,
            rows,
            setup.task,
            setup.tokenizer,
            setup.sampling,
            group_size=samples,
            first_sample=FIRST_SAMPLE,
            seed=seed,
            audited=len(rows) * samples,
        )
    answered = scored.trajectories
    longest_prompt = int((answered.lengths() - answered.sampled_lengths()).max())
    return _measured(executed, scored, longest_prompt + setup.sampling.max_new_tokens, told.residual_fraction)


def cached_rollout(opened: OpenPolicy, directory: Path) -> PrecisionRollout:
    """The answers of a saved guidance cache, at the precision it was written at.

    Raises:
      UserError: there is no cache, or it belongs to another policy, is not whole, or lacks full records.
    """
    origin = read_origin(directory)
    setup = opened.setup(precision_config(opened.config, origin.precision, "naive"))
    digest = UpdateDigest()
    for update in layer_updates(setup.policy, setup.rollout_plan, opened.params, opened.multipliers):
        digest.add(update)
    require_same(directory, origin, rollout_identity(setup, digest.ack(0).checksum))
    trajectories = GuidanceCache.open(directory).get(origin.correct)
    expected = len(origin.correct)
    if trajectories.num_sequences < expected:
        raise UserError(f"{directory}: {expected - trajectories.num_sequences} of {expected} samples are lost or damaged; {WRITE_ONE}")
    audited = 0 if trajectories.audit is None else trajectories.audit.sequences.size
    if audited < expected:
        raise UserError(f"{directory}: {audited} of {expected} samples have a full record; {WRITE_ONE}")
    reward = np.asarray(trajectories.reward)
    correct = np.fromiter(origin.correct.values(), bool, expected)
    scored = Scored(trajectories, correct, reward, int(np.isnan(reward).sum()))
    fraction = setup.config.rollout.residual_compensation.fraction
    return _measured(origin.precision, scored, int(trajectories.lengths().max()), fraction)


def _measured(precision: str, scored: Scored, max_length: int, residual_fraction: float) -> PrecisionRollout:
    trajectories, verified = scored.trajectories, ~np.isnan(scored.reward)
    return PrecisionRollout(
        precision,
        trajectories,
        max_length,
        prompts=np.unique(trajectories.group[verified]).size,
        pass_at_1=pass_interval(scored.correct, verified, trajectories.group),
        reward_mean=float(np.nanmean(scored.reward)) if verified.any() else float("nan"),
        residual_fraction=residual_fraction,
    )
