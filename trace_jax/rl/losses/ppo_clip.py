"""The clipped surrogate of PPO, with asymmetric bounds and an optional bound for negative advantages."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from trace_jax.rl.losses.objective import TokenObjective
from trace_jax.rl.ratios import clamp


def ppo_clip(
    log_ratio: Float32[Array, "B T"],
    advantages: Float32[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> TokenObjective:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and no less than c A where A < 0.

    So for A > 0 the ratio counts up to 1 + clip_high; for A < 0 down to 1 - clip_low and, with c, up to c. Beyond, the token has
    no gradient. With c the negative side is a band: QaRL's trust band (arXiv 2604.07853) on the ratio of the sequence.

    Source: Schulman et al., PPO (arXiv 1707.06347), equation 7; asymmetric clip, DAPO (arXiv 2503.14476); dual clip, Ye et al.
    (arXiv 1912.09729), equation 5. log r is clamped to +-20; beyond that the token has no gradient.

    Args:
        log_ratio: log pi_theta / pi_old at either level; the gradient flows through it.
        advantages: without a gradient.
        clip_low: >= 0, distance of the lower bound from 1.
        clip_high: >= 0, distance of the upper bound from 1.
        clip_c: > 1, or None for no bound.
    """
    ratio = jnp.exp(clamp(log_ratio))
    plain = ratio * advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    value = jnp.minimum(plain, clipped)
    is_clipped = clipped < plain
    if clip_c is not None:
        beyond = (advantages < 0) & (value < clip_c * advantages)
        value, is_clipped = jnp.where(beyond, clip_c * advantages, value), is_clipped | beyond
    return TokenObjective(value, is_clipped)
