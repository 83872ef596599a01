"""CISPO: the policy gradient of every token, weighted by its clipped ratio."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from trace_jax.rl.losses.objective import TokenObjective
from trace_jax.rl.ratios import clamp


def cispo(
    log_ratio: Float32[Array, "B T"],
    logp: Float32[Array, "B T"],
    advantages: Float32[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenObjective:
    """clip(r, 1 - clip_low, 1 + clip_high) A log pi_theta, the clipped ratio without a gradient.

    Unlike under PPO's clip, a token outside the bounds keeps a gradient; only its weight is cut. `clip_low` = 1 is no lower bound.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.

    Args:
        log_ratio: log pi_theta / pi_old at either level.
        logp: log-probs under the policy being updated, 0 outside the mask; the gradient flows through them alone.
        advantages: without a gradient.
        clip_low, clip_high: >= 0, distances of the bounds from 1.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(clamp(log_ratio)))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return TokenObjective(weight * advantages * logp, weight != ratio)
