"""One optimizer update from a set of scored trajectories, whatever its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float32, Int64

from trace_jax.metrics.weighted import Stats, combine
from trace_jax.rollout.micro_batches import MicroBatch, length_buckets, plan_micro_batches
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.batches import make_batch
from trace_jax.train.objective import ObjectiveSpec, objective_and_gradient, without_guidance
from trace_jax.train.state import TrainState, add_gradients, apply_gradients


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update.

    Args:
      spec: objective.
      optimizer: optax transformation.
      micro_batch_tokens: padded tokens of a micro-batch.
      max_length: longest sequence the run can produce; fixes the padded lengths.
      replay: whether routes are replayed.
    """

    spec: ObjectiveSpec
    optimizer: optax.GradientTransformation
    micro_batch_tokens: int
    max_length: int
    replay: bool = True

    def plan(self, lengths: np.ndarray) -> list[MicroBatch]:
        """Micro-batches of sequences with these lengths."""
        return plan_micro_batches(lengths, self.micro_batch_tokens, length_buckets(self.max_length, count=2))


@dataclass(frozen=True)
class UpdateResult:
    """State after the update, statistics, gradient norm before clipping, and the log-probabilities it started from."""

    state: TrainState
    stats: Stats
    grad_norm: float
    logp: Float32[np.ndarray, " N"]


def update_policy(
    state: TrainState,
    trajectories: Trajectories,
    advantages: Float32[np.ndarray, " B"],
    settings: UpdateSettings,
    *,
    sequences: Int64[np.ndarray, " S"] | None = None,
    logp_old: Float32[np.ndarray, " N"] | None = None,
    measure_unguided: bool = False,
) -> UpdateResult:
    """Takes one optimizer step.

    Args:
      trajectories: scored sequences.
      advantages: one per sequence.
      sequences: the sequences of this update; None takes all. The loss is normalised over their sampled tokens.
      logp_old: per token, the trainer's log-probabilities before the first update of the batch; None when this is the
        first one, whose own forward then provides them.
      measure_unguided: also report mismatch figures without the record, under the prefix `unguided/`.
    """
    chosen = np.arange(trajectories.num_sequences) if sequences is None else sequences
    total = jnp.float32(max(1, int(trajectories.sampled_lengths()[chosen].sum())))
    gradient, parts = None, []
    logp = np.zeros(trajectories.num_tokens, np.float32)
    for micro in settings.plan(trajectories.lengths()[chosen]):
        indices = chosen[micro.indices].tolist()
        batch, padded = make_batch(
            trajectories,
            indices,
            micro.length,
            micro.rows,
            num_layers=settings.spec.policy.config.num_layers,
            advantages=advantages,
            logp_old=logp_old,
            replay=settings.replay,
        )
        part, micro_logp, stats = objective_and_gradient(state.params, state.multipliers, batch, total, spec=settings.spec)
        gradient = part if gradient is None else add_gradients(gradient, part)
        if measure_unguided and batch.guides is not None:
            unguided = objective_and_gradient(state.params, state.multipliers, without_guidance(batch), total, spec=settings.spec)[2]
            stats = stats | {f"unguided/{name}": unguided[name] for name in unguided if _is_mismatch(name)}
        parts.append(stats)
        values = padded.gather(np.asarray(micro_logp))
        starts = trajectories.offsets[:-1][padded.sequence_indices]
        rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, padded.lengths, strict=True)])
        logp[rows] = values
    if gradient is None:
        raise ValueError("update_policy needs at least one sequence")
    params, opt_state, norm = apply_gradients(state.params, state.opt_state, gradient, optimizer=settings.optimizer)
    new_state = TrainState(params, opt_state, state.multipliers)
    return UpdateResult(new_state, combine(jax.device_get(parts)), float(norm), logp)


def _is_mismatch(name: str) -> bool:
    return name.startswith(("rollout_corr/", "train_rollout_logprob", "token_mult_prob_error"))
