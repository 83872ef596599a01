"""Log-ratios of two policies on the sampled tokens: per token, or one for a whole sequence.

token       log p(y_t) - log q(y_t)
sequence    sum over the sequence: the ratio is the product of its tokens' ratios
geometric   mean over the sequence: the ratio is the geometric mean, which does not grow with the length
"""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from trace_jax.rl.sequences import sequence_totals

RatioLevel: TypeAlias = Literal["token", "sequence", "geometric"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp (as in verl and tunix): exp(20) = 4.9e8 keeps sums of ratios finite in float32."""


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


def at_level(
    log_ratio: Float32[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None, level: RatioLevel
) -> Float32[Array, "B T"]:
    """The log-ratio by which each token is judged: its own, or that of its sequence.

    Args:
        log_ratio: per token, 0 where the mask is false (`masked_log_ratio`).
        mask: true on sampled tokens.
        segment_ids: the sequences of packed rows; None where one row is one sequence.
        level: see the top of this file.
    """
    if level == "token":
        return log_ratio
    total = sequence_totals(log_ratio, segment_ids)
    if level == "sequence":
        return total
    length = sequence_totals(mask.astype(jnp.int32), segment_ids)
    return total / jnp.maximum(length, 1).astype(jnp.float32)


def policy_log_ratio(
    log_ratio: Float32[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None, level: RatioLevel
) -> Float32[Array, "B T"]:
    """log pi_theta / pi_old at a level, with the gradient of the token's own log-prob.

    The value is that of the sequence, the gradient with respect to the token's log-prob is 1, as in GSPO's token form (arXiv
    2507.18071, equation 14). Averaged over the tokens of a sequence, the gradient of its ratio is that of the geometric mean.
    """
    if level == "token":
        return log_ratio
    fixed = jax.lax.stop_gradient(log_ratio)
    # The difference is exactly 0.
    return at_level(fixed, mask, segment_ids, level) + (log_ratio - fixed)
