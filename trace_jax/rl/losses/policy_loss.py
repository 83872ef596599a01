"""The policy loss of a micro-batch: ratio, objective per token, weight, sum.

loss = sum over micro-batches of policy_loss_sum(...) / batch_total(whole batch)
"""

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from trace_jax.metrics.weighted import Stats, WeightedMetric
from trace_jax.rl.aggregation import token_count
from trace_jax.rl.losses.cispo import cispo
from trace_jax.rl.losses.ppo_clip import ppo_clip
from trace_jax.rl.ratios import RatioLevel, masked_log_ratio, policy_log_ratio

LossKind: TypeAlias = Literal["ppo_clip", "cispo"]


class PolicyLoss(NamedTuple):
    """Settings of the loss.

    Args:
        kind: objective per token, a function of this package.
        ratio_level: whether r is the ratio of the token or the geometric mean over the sequence.
        clip_low, clip_high, clip_c: bounds of the ratio; `clip_c` is of `ppo_clip` alone.
    """

    kind: LossKind = "ppo_clip"
    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float | None = None


def policy_loss_sum(
    logp: Float32[Array, "B T"],
    logp_old: Float32[Array, "B T"],
    advantages: Float32[Array, " B"] | Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    weights: Float32[Array, "B T"] | None = None,
    divisors: Float32[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    loss: PolicyLoss,
) -> tuple[Float32[Array, ""], Stats]:
    """Sum over sampled tokens of -w * objective / divisor. The gradient flows through ``logp`` alone.

    Args:
        logp: log-probs under the policy being updated.
        logp_old: log-probs under the same forward before the update (guided, if ``logp`` is guided).
        advantages: one per sequence, f32[B], or one per token, f32[B, T].
        mask: true on the tokens in the loss.
        weights: correction for the rollout policy (``rollout_weights``); None is 1.
        divisors: of the token's sequence (``sequence_divisors``), positive; None is 1.
        segment_ids: the sequences of packed rows; None where one row is one sequence.
        loss: settings.

    Returns:
        The loss sum, f32 scalar, to be divided with ``normalized``; and the statistics ``policy/clip_fraction`` (tokens on whose ratio
        a bound acts) and ``policy/approx_kl`` (mean of logp_old - logp).
    """
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    per_token = jax.lax.stop_gradient(jnp.where(mask, per_token, 0.0))
    log_ratio = masked_log_ratio(logp, jax.lax.stop_gradient(logp_old), mask)
    judged = policy_log_ratio(log_ratio, mask, segment_ids, loss.ratio_level)
    if loss.kind == "cispo":
        objective, clipped = cispo(judged, jnp.where(mask, logp, 0.0), per_token, clip_low=loss.clip_low, clip_high=loss.clip_high)
    else:
        objective, clipped = ppo_clip(judged, per_token, clip_low=loss.clip_low, clip_high=loss.clip_high, clip_c=loss.clip_c)
    if weights is not None:
        objective = objective * jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    if divisors is not None:
        objective = objective / divisors
    loss_sum = -jnp.sum(jnp.where(mask, objective, 0.0))

    count = token_count(mask)
    stats: Stats = {
        "policy/clip_fraction": WeightedMetric(jnp.sum((mask & clipped).astype(jnp.float32)), count),
        "policy/approx_kl": WeightedMetric(-jnp.sum(jax.lax.stop_gradient(log_ratio)), count),
    }
    return loss_sum, stats
