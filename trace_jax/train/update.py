"""One optimizer update from a set of scored trajectories, whatever its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float32, Int64

from trace_jax.errors import UserError
from trace_jax.metrics.weighted import MaxMetric, Stats, WeightedMetric, combine
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.weights import with_rounded_experts
from trace_jax.rl.aggregation import Aggregation, batch_total, sequence_divisors
from trace_jax.rl.corrections import CORRECTION_FIGURES
from trace_jax.rollout.micro_batches import MicroBatch, length_buckets, plan_micro_batches
from trace_jax.rollout.trajectories import Trajectories, token_rows
from trace_jax.sharding.mesh import batch_shards, mesh_of, on_its_mesh
from trace_jax.train.batches import make_batch
from trace_jax.train.objective import ObjectiveSpec, objective_and_gradient, without_guidance
from trace_jax.train.state import TrainState, add_gradients, apply_gradients

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this."""


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update.

    Args:
      spec: objective.
      micro_batch_tokens: padded tokens of a micro-batch.
      max_length: longest sequence the run can produce; fixes the padded lengths.
      replay: whether routes are replayed.
      aggregation, loss_scale_factor: how the loss of the tokens becomes one number (`trace_jax.rl.aggregation`).
    """

    spec: ObjectiveSpec
    micro_batch_tokens: int
    max_length: int
    replay: bool = True
    aggregation: Aggregation = "token_mean"
    loss_scale_factor: int = 1

    def plan(self, lengths: Int64[np.ndarray, " S"], row_multiple: int = 1) -> list[MicroBatch]:
        """Micro-batches of sequences with these lengths; their rows are a multiple of the devices that share them."""
        buckets = length_buckets(self.max_length, count=2, multiple=LENGTH_MULTIPLE)
        return plan_micro_batches(lengths, self.micro_batch_tokens, buckets, row_multiple)


@dataclass(frozen=True)
class Measurement:
    """Log-probabilities per token of the trajectories (0 where no sequence was chosen), statistics, and the gradient."""

    logp: Float32[np.ndarray, " N"]
    stats: Stats
    gradient: Params


@dataclass(frozen=True)
class UpdateResult:
    """State after the update, its statistics, and the gradient norm before clipping."""

    state: TrainState
    stats: Stats
    grad_norm: float


@on_its_mesh
def measure(
    params: Params,
    multipliers: Multipliers,
    trajectories: Trajectories,
    settings: UpdateSettings,
    *,
    advantages: Float32[np.ndarray, " B"] | None = None,
    sequences: Int64[np.ndarray, " S"] | None = None,
    logp_old: Float32[np.ndarray, " N"] | None = None,
    measure_unguided: bool = False,
) -> Measurement:
    """Runs the objective over some sequences, micro-batch by micro-batch, and adds everything up.

    Every figure about the trainer's forward, in training as in diagnosis, comes from this function, because the gap to
    the rollout depends on the compiled program it is measured in.

    Args:
      trajectories: sequences with or without a guidance record.
      advantages: one per sequence; None for zeros (the gradient is then zero too).
      sequences: which sequences; None takes all. The loss is normalised over them.
      logp_old: per token, the trainer's log-probabilities before the first update of the batch; None when this forward
        itself provides them.
      measure_unguided: also report mismatch figures without the record, under the prefix `unguided/`.

    Raises:
      ValueError: no sequence was chosen.
      UserError: routes are to be replayed, and not one token has a route.
    """
    chosen = np.arange(trajectories.num_sequences) if sequences is None else sequences
    if not chosen.size:
        raise ValueError("no sequences to measure")
    if settings.replay:
        _require_routes(trajectories, chosen)
    sampled = trajectories.sampled_lengths()
    total = jnp.float32(max(1, batch_total(sampled[chosen], settings.aggregation, settings.loss_scale_factor)))
    divisors = sequence_divisors(sampled, settings.aggregation)
    mesh = mesh_of(params)
    params, spec = _rounded_once(params, settings.spec)
    gradient, parts = None, []
    logp = np.zeros(trajectories.num_tokens, np.float32)
    for micro in settings.plan(trajectories.lengths()[chosen], batch_shards(mesh)):
        batch, packed = make_batch(
            trajectories,
            [chosen[members].tolist() for members in micro.bins],
            micro.length,
            micro.rows,
            num_layers=spec.policy.config.num_layers,
            advantages=advantages,
            divisors=divisors,
            logp_old=logp_old,
            replay=settings.replay,
            mesh=mesh,
        )
        part, micro_logp, stats = objective_and_gradient(params, multipliers, batch, total, spec=spec)
        gradient = part if gradient is None else add_gradients(gradient, part)
        if measure_unguided and batch.guides is not None:
            unguided = objective_and_gradient(params, multipliers, without_guidance(batch), total, spec=spec)[2]
            stats = stats | {f"unguided/{name}": unguided[name] for name in unguided if _is_mismatch(name)}
        parts.append(stats)
        starts = trajectories.offsets[:-1][packed.sequence_indices]
        logp[token_rows(starts, packed.lengths)] = packed.gather(np.asarray(micro_logp))
    assert gradient is not None  # at least one sequence
    return Measurement(logp, _pooled(combine(jax.device_get(parts))), gradient)


@on_its_mesh
def update_policy(state: TrainState, measurement: Measurement, optimizer: optax.GradientTransformation) -> UpdateResult:
    """Takes one optimizer step along a measured gradient."""
    params, opt_state, norm = apply_gradients(state.params, state.opt_state, measurement.gradient, optimizer=optimizer)
    return UpdateResult(TrainState(params, opt_state, state.multipliers), measurement.stats, float(norm))


def _rounded_once(params: Params, spec: ObjectiveSpec) -> tuple[Params, ObjectiveSpec]:
    """Parameters with rounded experts and an objective that does not round them again: once for all micro-batches."""
    if spec.plan.weights == "bf16":
        return params, spec
    rounded = with_rounded_experts(params, fmt=spec.plan.weights, dtype=spec.policy.compute_dtype)
    return rounded, replace(spec, plan=replace(spec.plan, weights="bf16"))


def _pooled(stats: Stats) -> Stats:
    """Adds up what the device keeps in several counts because one would not fit int32; on the host they are int64."""

    def pool(metric: WeightedMetric | MaxMetric) -> WeightedMetric | MaxMetric:
        return WeightedMetric(np.sum(metric.sum), np.sum(metric.count)) if isinstance(metric, WeightedMetric) else metric

    return {name: pool(metric) for name, metric in stats.items()}


def _require_routes(trajectories: Trajectories, chosen: Int64[np.ndarray, " S"]) -> None:
    """Replay of nothing would look like training with replay, so it is refused."""
    rows = token_rows(trajectories.offsets[:-1][chosen], trajectories.lengths()[chosen])
    if trajectories.routes is None or not trajectories.routes.routes_valid[rows].any():
        raise UserError(
            "algorithm.routing_replay is true, but the rollout recorded no expert route; "
            "use an engine that returns routes, or write algorithm.routing_replay: false"
        )


def _is_mismatch(name: str) -> bool:
    return name.startswith(("rollout_corr/", "train_rollout_logprob", "token_mult_prob_error")) and name not in CORRECTION_FIGURES
