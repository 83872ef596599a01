"""The policy-gradient objective of one micro-batch, with its gradient and diagnostics in one compiled function.

1. Teacher-forced forward under the trainer's plan: routes replayed, guided sites rounded as the record says.
2. Log-probabilities of the sampled tokens at the sampling temperature.
3. Policy loss: ratio pi / pi_old, objective per token, weight against the rollout's gap, sum over tokens divided by a total of the
   whole batch.
4. Mismatch figures between the trainer's and the rollout's log-probabilities, from this same forward.

The unguided figures come from the same compiled function with every record marked missing, because on real hardware the
gap depends on the program it is measured in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.layers.logprobs import token_logprobs
from trace_jax.metrics.weighted import Stats, WeightedMetric
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rl.aggregation import normalized
from trace_jax.rl.corrections import Correction, correction_stats, rollout_weights
from trace_jax.rl.diagnostics import entropy_stats, mismatch_stats
from trace_jax.rl.losses import PolicyLoss, policy_loss_sum
from trace_jax.sharding.axes import constrain
from trace_jax.sharding.rules import constrain_params
from trace_jax.train.batches import TrainBatch


@dataclass(frozen=True)
class ObjectiveSpec:
    """Static choices of the objective: policy, the trainer's plan, and the settings of `algorithm` that act on tokens."""

    policy: Policy
    plan: QuantPlan
    loss: PolicyLoss = PolicyLoss()
    correction: Correction = Correction()


def batch_logprobs(
    params: Params, multipliers: Multipliers, batch: TrainBatch, spec: ObjectiveSpec
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Any]:
    """Log-probability and entropy at every token (0 at the first of a sequence), and the forward's output."""
    options = spec.policy.options(spec.plan, remat=spec.policy.remat, measure_parity=True)
    output = spec.policy.forward(params, batch.inputs(multipliers), options)
    logp, entropy = token_logprobs(output.hidden[:, :-1], spec.policy.head(params), batch.tokens[:, 1:], batch.temperature[:, 1:])

    def shift(x: Float[Array, "B later"]) -> Float[Array, "B T"]:
        # The column before the first token of a packed sequence belongs to another sequence.
        return jnp.where(batch.positions > 0, jnp.pad(x, ((0, 0), (1, 0))), 0.0)

    return shift(logp), shift(entropy), output


@functools.partial(jax.jit, static_argnames=("spec",))
def objective_and_gradient(
    params: Params, multipliers: Multipliers, batch: TrainBatch, total: Float[Array, ""], *, spec: ObjectiveSpec
) -> tuple[Params, Float[Array, "B T"], Stats]:
    """Gradient of the batch loss with respect to the parameters, from one micro-batch; float32.

    Args:
      params: masters, or parameters with rounded experts under a plan that rounds no weight.
      total: what the loss sum of all micro-batches is divided by (`batch_total`, float32).
      spec: static.

    Returns:
      The micro-batch's share of the gradient, log-probabilities `[B, T]`, and statistics as sums and counts, some of them in several
      parts.
    """

    def loss_fn(params: Params) -> tuple[Array, tuple[Array, Stats]]:
        logp, entropy, output = batch_logprobs(params, multipliers, batch, spec)
        fixed = jax.lax.stop_gradient(logp)
        logp_old = fixed if batch.logp_old is None else batch.logp_old
        mask, segments = batch.sampled, batch.segment_ids
        weights = rollout_weights(logp_old, batch.logp_rollout, mask, segments, **spec.correction._asdict())
        loss_sum, stats = policy_loss_sum(logp, logp_old, batch.advantages, mask, weights, batch.divisors, segments, loss=spec.loss)
        loss = normalized(loss_sum, total)
        stats |= mismatch_stats(fixed, batch.logp_rollout, mask, segments, cap=spec.correction.cap)
        stats |= correction_stats(weights, logp_old, batch.logp_rollout, mask, segments, spec.correction)
        stats |= entropy_stats(jax.lax.stop_gradient(entropy), batch.sampled)
        stats |= _parity(output.parity)
        stats |= _route_agreement(output.own_routes, batch)
        stats["loss"] = WeightedMetric(loss, 0)
        return loss, (fixed, stats)

    gradient, (logp, stats) = jax.grad(loss_fn, has_aux=True)(params)
    gradient = constrain_params(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient))
    return gradient, *jax.tree.map(constrain, (logp, stats))  # what the host reads is whole on every device


def without_guidance(batch: TrainBatch) -> TrainBatch:
    """The same batch with every record marked missing."""
    if batch.guides is None:
        return batch
    return replace(batch, guides=replace(batch.guides, valid=jnp.zeros_like(batch.guides.valid)))


def _parity(parity: dict[str, tuple[Float[Array, " L"], Float[Array, " L"]]]) -> Stats:
    """One sum and count per site and layer: over all of them, a large micro-batch has more values than int32 can count."""
    if not parity:
        return {}
    agreed, counted = (jnp.concatenate(parts) for parts in zip(*parity.values(), strict=True))
    return {"guidance/parity_agreement": WeightedMetric(agreed, counted.astype(jnp.int32))}


def _route_agreement(own: Int[Array, "B T Lm k"], batch: TrainBatch) -> Stats:
    """Share of (token, layer) pairs for which the trainer's router would have chosen the recorded experts."""
    if batch.routes is None:
        return {}
    recorded = jnp.all(batch.routes >= 0, axis=-1)
    equal = jnp.all(jnp.sort(own, axis=-1) == jnp.sort(batch.routes, axis=-1), axis=-1)
    return {"router/agreement": WeightedMetric(jnp.sum((equal & recorded).astype(jnp.float32)), jnp.sum(recorded.astype(jnp.int32)))}
