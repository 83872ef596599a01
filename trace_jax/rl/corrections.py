"""Importance weights that correct for sampling from the rollout policy instead of the trainer's.

Source: truncated importance sampling (TIS), Yao, Liu et al. 2025 (FlashRL), at token level; TRACE (arXiv 2610.07767) uses it
with an upper cap of 5. The policy ratio pi_theta / pi_old of the clipped loss is separate and not part of the weight.
"""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

CorrectionKind: TypeAlias = Literal["none", "tis"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp (as in verl and tunix): exp(20) = 4.9e8 keeps sums of ratios finite in float32."""


def rollout_weights(
    logp_old: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    kind: CorrectionKind = "tis",
    cap: float = 5.0,
) -> Float32[Array, "B T"]:
    """w = min(exp(logp_old - logp_rollout), cap) per token, without a gradient.

    Args:
        logp_old: log-probs under the trainer's forward before the update, at the sampling temperature.
        logp_rollout: log-probs that the rollout engine returned, under the distribution sampled from.
        mask: true on sampled tokens.
        kind: ``tis``, or ``none`` for a weight of 1.
        cap: upper bound of the weight, > 0. There is no lower bound.

    Returns:
        f32[B, T]; 0 where the mask is false.

    Raises:
        ValueError: for another kind, or a cap that is not positive.
    """
    if kind not in ("none", "tis"):
        raise ValueError(f"correction kind {kind!r} is unknown; write 'none' or 'tis'")
    if not cap > 0:
        raise ValueError(f"correction cap must be positive, got {cap}")
    if kind == "none":
        return mask.astype(jnp.float32)
    weights = jnp.minimum(jnp.exp(clamp(masked_log_ratio(logp_old, logp_rollout, mask))), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))


def masked_log_ratio(
    numerator: Float32[Array, "B T"], denominator: Float32[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float32[Array, "B T"]:
    """numerator - denominator, and 0 where the mask is false.

    The inputs are masked before the subtraction, so a NaN or an infinity in the padding reaches neither the value nor
    the gradient. A NaN on a sampled token stays NaN.
    """
    return jnp.where(mask, numerator, 0.0) - jnp.where(mask, denominator, 0.0)


def clamp(log_ratio: Float32[Array, "B T"]) -> Float32[Array, "B T"]:
    """The log-ratio within +-LOG_RATIO_LIMIT, ready for exp. The gradient is 0 where the clamp acts."""
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
