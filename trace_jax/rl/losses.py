"""The clipped policy loss as a sum over tokens, and the division by the token count of the whole batch.

    loss = sum over micro-batches of ppo_clip_loss_sum(...) / token_count(whole batch)

A micro-batch never divides by its own count, so the loss and its gradient are the same for any micro-batch size, any
number of shards and any padding (token mean, DAPO, arXiv 2503.14476, equation 12).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from trace_jax.metrics.weighted import Stats, WeightedMetric
from trace_jax.rl.corrections import clamp, masked_log_ratio


def ppo_clip_loss_sum(
    logp: Float32[Array, "B T"],
    logp_old: Float32[Array, "B T"],
    advantages: Float32[Array, " B"] | Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    weights: Float32[Array, "B T"] | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float32[Array, ""], Stats]:
    """Sum over sampled tokens of -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - logp_old).

    Source: Schulman et al., PPO (arXiv 1707.06347), equation 7; asymmetric clip of DAPO (arXiv 2503.14476). The gradient
    flows through ``logp`` alone. log r is clamped to +-20; beyond that the token has no gradient.

    Args:
        logp: log-probs under the policy being updated.
        logp_old: log-probs under the same forward before the update (guided, if ``logp`` is guided).
        advantages: one per sequence, f32[B], or one per token, f32[B, T].
        mask: true on the tokens in the loss.
        weights: correction for the rollout policy (``rollout_weights``); None is 1.
        clip_low: >= 0, distance of the lower bound from 1.
        clip_high: >= 0, distance of the upper bound from 1.

    Returns:
        The loss sum, f32 scalar, to be divided with ``token_mean``; and the statistics ``policy/clip_fraction`` (tokens on
        which the clipped branch is strictly smaller, so that they have no gradient) and ``policy/approx_kl`` (mean of
        logp_old - logp).
    """
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    per_token = jax.lax.stop_gradient(jnp.where(mask, per_token, 0.0))
    log_ratio = masked_log_ratio(logp, jax.lax.stop_gradient(logp_old), mask)
    ratio = jnp.exp(clamp(log_ratio))
    plain = ratio * per_token
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * per_token
    objective = jnp.minimum(plain, clipped)
    if weights is not None:
        objective = objective * jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    loss_sum = -jnp.sum(jnp.where(mask, objective, 0.0))

    count = token_count(mask)
    is_clipped = mask & (clipped < plain)
    stats: Stats = {
        "policy/clip_fraction": WeightedMetric(jnp.sum(is_clipped.astype(jnp.float32)), count),
        "policy/approx_kl": WeightedMetric(-jnp.sum(jax.lax.stop_gradient(log_ratio)), count),
    }
    return loss_sum, stats


def token_count(mask: Bool[Array, "B T"]) -> Int32[Array, ""]:
    """Number of tokens in the loss."""
    return jnp.sum(mask.astype(jnp.int32))


def token_mean(loss_sum: Float32[Array, ""], global_count: Int32[Array, ""] | Float32[Array, ""] | int) -> Float32[Array, ""]:
    """loss_sum / global_count, where the count is that of the whole batch on all devices; 0 for an empty batch."""
    return loss_sum / jnp.maximum(jnp.asarray(global_count).astype(jnp.float32), 1.0)
