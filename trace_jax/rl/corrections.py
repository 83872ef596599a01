"""Importance weights that correct for sampling from the rollout policy instead of the trainer's.

With rho = pi_old / pi_rollout at a level (`trace_jax.rl.ratios`), the weight w of a token is

    none      1
    tis       min(rho, cap)                        truncated importance sampling
    mis       rho if rho <= cap, else 0            masked importance sampling
    icepop    rho if low <= rho <= cap, else 0     IcePop's band

Sources: TIS, Yao, Liu et al. 2025 (FlashRL), per token; TRACE (arXiv 2610.07767) uses it with a cap of 5. Weights and masks of whole
sequences, Liu, Li et al. 2025 ("When speed kills stability") and verl's rollout correction. IcePop, Ring-1T (arXiv 2510.18855).

A masked token has no gradient and stays in the denominator of the loss, so that rejecting some does not make the others heavier.
The policy ratio pi_theta / pi_old of the clipped loss is separate and not part of the weight.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from trace_jax.metrics.weighted import Stats, WeightedMetric
from trace_jax.rl.aggregation import token_count
from trace_jax.rl.ratios import RatioLevel, at_level, clamp, masked_log_ratio
from trace_jax.rl.sequences import sequence_sums

CorrectionKind: TypeAlias = Literal["none", "tis", "mis", "icepop"]


CORRECTION_FIGURES = _SEQUENCES_HIGH, _LOW, _MASKED, _SEQUENCES_MASKED = (
    "rollout_corr/rollout_is_seq_ratio_fraction_high",
    "rollout_corr/rollout_is_ratio_fraction_low",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction",
)
"""What `correction_stats` reports, of the weights that trained: a forward without guidance has no twin of it."""


class Correction(NamedTuple):
    """The keyword arguments of `rollout_weights`; `low` belongs to `icepop`."""

    kind: CorrectionKind = "tis"
    level: RatioLevel = "token"
    cap: float = 5.0
    low: float = 0.5


def rollout_weights(
    logp_old: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    kind: CorrectionKind = "tis",
    level: RatioLevel = "token",
    cap: float = 5.0,
    low: float = 0.5,
) -> Float32[Array, "B T"]:
    """The weight of every token, without a gradient.

    Args:
        logp_old: log-probs under the trainer's forward before the update, at the sampling temperature.
        logp_rollout: log-probs that the rollout engine returned, under the distribution sampled from.
        mask: true on sampled tokens.
        segment_ids: the sequences of packed rows; None where one row is one sequence.
        kind: see the top of this file.
        level: whether rho is that of the token, the product over the sequence, or its geometric mean.
        cap: upper bound of rho, > 0.
        low: lower bound of rho, >= 0 and below the cap; of `icepop` alone.

    Returns:
        f32[B, T]; 0 where the mask is false.

    Raises:
        ValueError: for another kind, a cap that is not positive, or an empty band.
    """
    if kind not in get_args(CorrectionKind):
        raise ValueError(f"correction kind {kind!r} is unknown; write one of {', '.join(get_args(CorrectionKind))}")
    if not cap > 0:
        raise ValueError(f"correction cap must be positive, got {cap}")
    if kind == "icepop" and not 0 <= low < cap:
        raise ValueError(f"correction low must be at least 0 and below the cap {cap}, got {low}")
    if kind == "none":
        return mask.astype(jnp.float32)
    ratio = jnp.exp(_rollout_log_ratio(logp_old, logp_rollout, mask, segment_ids, level))
    if kind == "tis":
        weights = jnp.minimum(ratio, cap)
    else:
        # By what is outside, not by what is inside: a NaN is neither, and must not be masked away.
        outside = ratio > cap if kind == "mis" else (ratio > cap) | (ratio < low)
        weights = jnp.where(outside, 0.0, ratio)
    return jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))


def correction_stats(
    weights: Float32[Array, "B T"],
    logp_old: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    correction: Correction,
) -> Stats:
    """What the correction did, beyond `mismatch_stats`, which has the figures of the token ratio.

    Returns:
        The first of `CORRECTION_FIGURES` where the level is not the token: share of tokens whose rho at that level is above the cap. The
        second, of `icepop`: the same below `low`. The others, of `mis` and `icepop`: share of tokens with weight 0, and of sequences with
        such a token.
    """
    stats: Stats = {}
    if correction.kind == "none":
        return stats
    tokens = token_count(mask)
    ratio = jnp.exp(_rollout_log_ratio(logp_old, logp_rollout, mask, segment_ids, correction.level))

    def share(chosen: Bool[Array, "B T"]) -> WeightedMetric:
        return WeightedMetric(jnp.sum((chosen & mask).astype(jnp.float32)), tokens)

    if correction.level != "token":
        stats[_SEQUENCES_HIGH] = share(ratio > correction.cap)
    if correction.kind == "icepop":
        stats[_LOW] = share(ratio < correction.low)
    if correction.kind in ("mis", "icepop"):
        masked = mask & (weights == 0.0)
        hit = (sequence_sums(masked.astype(jnp.int32), segment_ids) > 0).astype(jnp.float32)
        sequences = (sequence_sums(mask.astype(jnp.int32), segment_ids) > 0).astype(jnp.int32)
        stats[_MASKED] = share(masked)
        stats[_SEQUENCES_MASKED] = WeightedMetric(jnp.sum(hit), jnp.sum(sequences))
    return stats


def _rollout_log_ratio(
    logp_old: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    level: RatioLevel,
) -> Float32[Array, "B T"]:
    return clamp(at_level(masked_log_ratio(logp_old, logp_rollout, mask), mask, segment_ids, level))
