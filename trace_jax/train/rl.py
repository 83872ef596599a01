"""One RL step as data, and the loop around it.

1. Take the next prompts of the training stream and request `group_size` answers each.
2. The engine generates with its own rounding and records it. Verify the answers. With dynamic sampling, again from 1 until enough
   groups have a signal.
3. Normalise rewards inside each group.
4. Update the policy: `updates_per_batch` optimizer steps on disjoint sets of groups.
5. Send the weights to the engine every `sync.every` updates.

Every random choice follows from the seed and the counters in `Progress`, and the engine's weights from `sync.every` alone, so a
resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optax
from jaxtyping import Float32, Int64

from trace_jax.evaluation.audit import audit_metrics
from trace_jax.evaluation.pass_rate import measure_pass_rate
from trace_jax.metrics.weighted import combine, finalize
from trace_jax.rl.advantages import frac_reward_zero_std, group_advantages
from trace_jax.rl.overlong import overlong_penalty
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.trajectories import FinishReason, Trajectories
from trace_jax.train.checkpoint import Progress
from trace_jax.train.clock import Clock
from trace_jax.train.dynamic_sampling import step_answers
from trace_jax.train.optimizer import learning_rate_schedule, make_optimizer
from trace_jax.train.setup import Setup, sync_weights
from trace_jax.train.skipped import count_skipped
from trace_jax.train.state import PolicyVersion, TrainState
from trace_jax.train.update import UpdateSettings, measure, update_policy

REMEDY = "lower optimizer.learning_rate, or resume from an earlier checkpoint"
"""Against gradients that are not finite."""


@dataclass
class Learner:
    """The mutable part of a run: state, counters, and the engine with the weights that it serves."""

    setup: Setup
    settings: UpdateSettings
    optimizer: optax.GradientTransformation
    engine: Engine
    state: TrainState
    progress: Progress
    served: PolicyVersion

    def sync(self) -> None:
        """Brings the engine to the current weights."""
        self.serve(PolicyVersion(self.state.params, self.progress.version))

    def serve(self, weights: PolicyVersion) -> None:
        """Brings the engine to these weights; does nothing if it has them."""
        if self.served.version != weights.version:
            sync_weights(self.engine, self.setup, weights.params, self.state.multipliers, weights.version)
            self.served = weights


def make_learner(setup: Setup, state: TrainState, progress: Progress, engine: Engine, served: PolicyVersion | None = None) -> Learner:
    """A learner whose engine serves the weights of `served`; None for those of `state`."""
    config = setup.config
    settings = setup.updates(setup.max_sequence_tokens())
    served = served or PolicyVersion(state.params, progress.version)
    sync_weights(engine, setup, served.params, state.multipliers, served.version)
    return Learner(setup, settings, make_optimizer(config.optimizer), engine, state, progress, served)


def rl_step(learner: Learner, clock: Clock) -> tuple[dict[str, float], Trajectories]:
    """Runs one step and returns its metrics and the scored trajectories; the clock gets the time of its parts.

    Raises:
      UserError: three gradients in a row were not finite, or the reward fails on every answer.
    """
    setup, config, progress = learner.setup, learner.setup.config, learner.progress
    step, rollout, overlong = progress.step + 1, config.rollout, config.algorithm.overlong_buffer
    audited = config.guidance.audit.sequences if _due(step, config.guidance.audit.every) else 0
    audited = min(audited, rollout.prompts_per_step * rollout.group_size)
    answers = step_answers(setup, learner.engine, progress, clock, audited=audited)
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

    metrics = audit_metrics(learner.settings, learner.state, trajectories) if audited else {}
    clock.lap("audit")
    metrics |= _update(learner, trajectories, advantages, answers.trained, clock, _due(step, config.train.unguided_every))
    learner.progress = replace(
        learner.progress,
        step=step,
        data_position=progress.data_position + answers.batches * rollout.prompts_per_step,
        samples=progress.samples + trajectories.num_sequences,
    )
    metrics |= _rollout_metrics(scored, trajectories)
    if overlong.enable:
        metrics["reward/overlong_mean"] = float(penalty.mean())
    if config.algorithm.filter_groups.enable:
        metrics |= {"train/num_gen_batches": float(answers.batches), "train/filtered_groups": float(answers.filtered_groups())}
    metrics["throughput/rollout_tokens_per_s"] = int(trajectories.sampled.sum()) / clock.laps["rollout"]
    metrics["throughput/train_tokens_per_s"] = int(trajectories.lengths()[answers.trained].sum()) / max(clock.laps["train"], 1e-9)
    metrics["learning_rate"] = float(np.asarray(learning_rate_schedule(config.optimizer)(learner.progress.version - 1)))
    return metrics, trajectories


def evaluate(learner: Learner) -> dict[str, Any]:
    """Pass rate of the current weights at the rollout's precision on the configured split, under `eval/<split>/...`.

    The engine serves afterwards what it served before: measuring must not change the run.
    """
    config, served = learner.setup.config, learner.served
    learner.sync()
    sampling = replace(learner.setup.sampling, temperature=0.0 if config.eval.greedy else learner.setup.sampling.temperature)
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
        "sync/version": float(learner.served.version),
        "sync/staleness": float(max(staleness)),
        "train/skipped_updates": float(np.sum(~np.isfinite(norms))),
    }
    return metrics


def _update_sets(group: Int64[np.ndarray, " B"], trained: Int64[np.ndarray, " S"], updates: int) -> list[Int64[np.ndarray, " _"]]:
    """The trained sequences as disjoint sets of whole groups, one per optimizer step."""
    groups = np.unique(group[trained])
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(groups, min(updates, groups.size))]


def _rollout_metrics(scored: Scored, trajectories: Trajectories) -> dict[str, float]:
    verified = ~np.isnan(scored.reward)
    lengths = trajectories.sampled_lengths()
    metrics = {
        "reward/mean": float(scored.reward[verified].mean()) if verified.any() else float("nan"),
        "reward/pass_rate": float(scored.correct[verified].mean()) if verified.any() else float("nan"),
        "reward/verifier_errors": float(scored.verifier_errors),
        "frac_reward_zero_std": frac_reward_zero_std(scored.reward, trajectories.group),
        "response/length_mean": float(lengths.mean()),
        "response/truncated_fraction": float(np.mean(trajectories.finish_reason == FinishReason.LENGTH)),
    }
    record = trajectories.guidance
    if record is not None:
        # The last token of a sequence is never an input, so it has no record and is not missing one.
        fed = np.ones(trajectories.num_tokens, bool)
        fed[trajectories.offsets[1:] - 1] = False
        metrics["guidance/missing_fraction"] = float(np.mean(~record.valid[fed]))
        recomputed = record.recomputed
        metrics["guidance/recomputed_fraction"] = 0.0 if recomputed is None else float(np.mean(recomputed[fed]))
        sizes = record.bytes_per_token()
        metrics |= {f"guidance/bytes_per_token/{name}": size for name, size in sizes.items() if name != "total"}
        metrics["guidance/bytes_per_token"] = sizes["total"]
        saturated = [np.mean(site.scales[record.valid] == 0x7E) for site in record.sites.values() if site.format == "nvfp4"]
        metrics["guidance/saturation_fraction"] = float(np.mean(saturated)) if saturated else 0.0
    return metrics


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
