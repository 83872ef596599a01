"""One RL step as data, and the loop around it.

1. Take the next prompts of the training stream and request `group_size` answers each.
2. The engine generates with its own rounding and records it. Verify the answers. With dynamic sampling, again from 1 until enough
   groups have a signal.
3. Normalise rewards inside each group.
4. Update the policy: `updates_per_batch` optimizer steps on disjoint sets of groups.
5. Send the weights to the engine every `sync.every` updates.

Every random choice follows from the seed and the counters in `Progress`, and the engine's weights from `sync.every` alone, so a
resumed run repeats the uninterrupted one.

Asynchronous (`sync.max_staleness`): a `RolloutStream` generates the batches ahead of 1 and 2, and takes the weights of 5 when it can. The
prompts, sample ids and counters are the same; the weights that draw a token depend on time.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optax
from jaxtyping import Float32, Int64

from trace_jax.evaluation.audit import audit_metrics
from trace_jax.evaluation.pass_rate import measure_pass_rate
from trace_jax.metrics.weighted import combine, finalize
from trace_jax.rl.advantages import group_advantages
from trace_jax.rl.overlong import overlong_penalty
from trace_jax.rollout.engine import Engine, generate
from trace_jax.rollout.stream import Batch, RolloutStream
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.checkpoint import Progress
from trace_jax.train.clock import Clock
from trace_jax.train.dynamic_sampling import step_answers
from trace_jax.train.optimizer import learning_rate_schedule, make_optimizer
from trace_jax.train.prompt_batches import PromptBatches, is_due
from trace_jax.train.rollout_metrics import rollout_metrics, staleness_metrics
from trace_jax.train.setup import Setup, sync_weights, weight_updates
from trace_jax.train.skipped import count_skipped
from trace_jax.train.state import PolicyVersion, TrainState
from trace_jax.train.update import UpdateSettings, measure, update_policy

REMEDY = "lower optimizer.learning_rate, or resume from an earlier checkpoint"
"""Against gradients that are not finite."""


@dataclass
class Learner:
    """The mutable part of a run: state, counters, and the engine with the weights that it serves.

    Args:
      stream: what generates ahead in an asynchronous run; `served` is then what it was offered last.
    """

    setup: Setup
    settings: UpdateSettings
    optimizer: optax.GradientTransformation
    engine: Engine
    state: TrainState
    progress: Progress
    served: PolicyVersion
    stream: RolloutStream | None = None

    def sync(self) -> None:
        """Brings the engine to the current weights."""
        self.serve(PolicyVersion(self.state.params, self.progress.version))

    def serve(self, weights: PolicyVersion) -> None:
        """Brings the engine to these weights; does nothing if it has them."""
        if self.served.version == weights.version:
            return
        if self.stream is None:
            sync_weights(self.engine, self.setup, weights.params, self.state.multipliers, weights.version)
        else:
            # Rounded here and now: what waits for the engine is then its small tensors, and not another set of masters.
            self.stream.offer(list(weight_updates(self.setup, weights.params, self.state.multipliers)), weights.version)
        self.served = weights

    def close(self) -> None:
        """Ends the engine and what generates with it."""
        if self.stream is not None:
            self.stream.close()
        self.engine.close()


def make_learner(setup: Setup, state: TrainState, progress: Progress, engine: Engine, served: PolicyVersion | None = None) -> Learner:
    """A learner whose engine serves the weights of `served`; None for those of `state`."""
    config = setup.config
    settings = setup.updates(setup.max_sequence_tokens())
    served = served or PolicyVersion(state.params, progress.version)
    sync_weights(engine, setup, served.params, state.multipliers, served.version)
    first = progress.data_position // config.rollout.prompts_per_step
    stream = PromptBatches(setup).stream(engine, first, served.version) if config.asynchronous else None
    return Learner(setup, settings, make_optimizer(config.optimizer), engine, state, progress, served, stream)


def rl_step(learner: Learner, clock: Clock) -> tuple[dict[str, float], Trajectories]:
    """Runs one step and returns its metrics and the scored trajectories; the clock gets the time of its parts.

    Raises:
      UserError: three gradients in a row were not finite, or the reward fails on every answer.
    """
    config, progress = learner.setup.config, learner.progress
    step, rollout, overlong = progress.step + 1, config.rollout, config.algorithm.overlong_buffer
    answers = step_answers(config, lambda batch: _take(learner, batch, clock))
    scored, trajectories = answers.scored, answers.scored.trajectories
    rewards = scored.reward
    if overlong.enable:
        penalty = overlong_penalty(
            trajectories.sampled_lengths(),
            max_length=rollout.max_new_tokens,
            buffer=overlong.len or max(1, rollout.max_new_tokens // 5),
            factor=overlong.penalty_factor,
        )
        rewards = rewards + penalty
    advantages = group_advantages(rewards, trajectories.group, normalize_std=config.algorithm.normalize_std)
    clock.lap("reward")

    metrics = audit_metrics(learner.settings, learner.state, trajectories, progress.version)
    clock.lap("audit")
    if learner.stream is not None:
        metrics |= staleness_metrics(trajectories.select(answers.trained), progress.version)
        metrics |= {"sync/regenerated": float(answers.regenerated), "sync/batches_ahead": float(learner.stream.waiting)}
    metrics |= _update(learner, trajectories, advantages, answers.trained, clock, is_due(step, config.train.unguided_every))
    learner.progress = replace(
        learner.progress,
        step=step,
        data_position=progress.data_position + answers.batches * rollout.prompts_per_step,
        samples=progress.samples + trajectories.num_sequences,
    )
    metrics |= rollout_metrics(scored, trajectories)
    if overlong.enable:
        metrics["reward/overlong_mean"] = float(penalty.mean())
    if config.algorithm.filter_groups.enable:
        metrics |= {"train/num_gen_batches": float(answers.batches), "train/filtered_groups": float(answers.filtered_groups())}
    metrics["throughput/rollout_tokens_per_s"] = int(trajectories.sampled.sum()) / max(answers.seconds, 1e-9)
    metrics["throughput/train_tokens_per_s"] = int(trajectories.lengths()[answers.trained].sum()) / max(clock.laps["train"], 1e-9)
    metrics["learning_rate"] = float(np.asarray(learning_rate_schedule(config.optimizer)(learner.progress.version - 1)))
    return metrics, trajectories


def _take(learner: Learner, batch: int, clock: Clock) -> Batch:
    """The next batch of the training stream, `batch` of them after the first of the step; the clock gets the time waited for it."""
    config, progress = learner.setup.config, learner.progress
    if learner.stream is not None:
        taken = learner.stream.take(progress.version, config.steps - progress.step, lambda: clock.lap("rollout"))
        clock.lap("reward")
        return taken
    batches, before = PromptBatches(learner.setup), clock.laps["rollout"]
    number = progress.data_position // batches.size + batch
    audited = batch == 0 and is_due(progress.step + 1, config.guidance.audit.every)
    trajectories = generate(learner.engine, batches.requests(number, audited))
    clock.lap("rollout")
    scored = batches.score(number, trajectories)
    clock.lap("reward")
    return Batch(scored, clock.laps["rollout"] - before)


def evaluate(learner: Learner) -> dict[str, Any]:
    """Pass rate of the current weights at the rollout's precision on the configured split, under `eval/<split>/...`.

    The engine serves afterwards what it served before: measuring must not change the run.
    """
    config, served = learner.setup.config, learner.served
    sampling = replace(learner.setup.sampling, temperature=0.0 if config.eval.greedy else learner.setup.sampling.temperature)
    with learner.stream.held() if learner.stream is not None else nullcontext():
        learner.sync()
        result = measure_pass_rate(
            learner.engine,
            learner.setup.task,
            learner.setup.tokenizer,
            sampling,
            split=config.eval.split,
            samples=config.eval.samples,
            max_prompts=config.eval.max_prompts,
            seed=config.seed,
        )
        learner.serve(served)
    prefix = f"eval/{config.eval.split}"
    return {
        f"{prefix}/pass_at_1": result.pass_at_1,
        f"{prefix}/pass_at_1_low": result.low,
        f"{prefix}/pass_at_1_high": result.high,
        f"{prefix}/reward_mean": result.reward_mean,
        f"{prefix}/precision": result.precision,
    }


def _update(
    learner: Learner,
    trajectories: Trajectories,
    advantages: Float32[np.ndarray, " B"],
    trained: Int64[np.ndarray, " S"],
    clock: Clock,
    unguided: bool,
) -> dict[str, float]:
    config = learner.setup.config
    sets = _update_sets(trajectories.group, trained, config.train.updates_per_batch)
    logp_old = None
    if len(sets) > 1:
        logp_old = measure(learner.state.params, learner.state.multipliers, trajectories, learner.settings, sequences=trained).logp
        clock.lap("train")
    parts, norms, staleness = [], [], []
    for sequences in sets:
        used = trajectories.select(sequences).weight_version
        staleness.append(learner.progress.version - int(used.min()))
        measured = measure(
            learner.state.params,
            learner.state.multipliers,
            trajectories,
            learner.settings,
            advantages=advantages,
            sequences=sequences,
            logp_old=logp_old,
            measure_unguided=unguided,
        )
        result = update_policy(learner.state, measured, learner.optimizer)
        learner.state, progress = result.state, learner.progress
        in_a_row = count_skipped(progress.skipped_in_a_row, result.grad_norm, progress.step + 1, REMEDY)
        # A refused update leaves the weights, and thus their version, as they were.
        learner.progress = replace(progress, version=progress.version + (in_a_row == 0), skipped_in_a_row=in_a_row)
        parts.append(result.stats)
        norms.append(result.grad_norm)
        clock.lap("train")
        if learner.progress.version - learner.served.version >= config.sync.every:
            learner.sync()
            clock.lap("sync")
    metrics = finalize({name: metric for name, metric in combine(parts).items() if name != "loss"})
    metrics["loss"] = float(np.mean([np.sum(part["loss"].sum) for part in parts]))  # pyright: ignore
    metrics |= {
        "grad_norm": float(np.mean(norms)),
        "sync/version": float(learner.served.version if learner.stream is None else learner.stream.version),
        "sync/staleness": float(max(staleness)),
        "train/skipped_updates": float(np.sum(~np.isfinite(norms))),
    }
    return metrics


def _update_sets(group: Int64[np.ndarray, " B"], trained: Int64[np.ndarray, " S"], updates: int) -> list[Int64[np.ndarray, " _"]]:
    """The trained sequences as disjoint sets of whole groups, one per optimizer step."""
    groups = np.unique(group[trained])
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(groups, min(updates, groups.size))]
