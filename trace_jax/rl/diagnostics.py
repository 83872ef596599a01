"""How far the trainer's policy is from the rollout's, on the sampled tokens.

With d = logp_train - logp_rollout and rho = exp(d clamped to +-20), over sampled tokens:

    rollout_corr/kl                              mean(-d), the direct estimate of KL(rollout || train); may be negative
    rollout_corr/k3_kl                           mean(rho - 1 - d), the non-negative estimate of the same KL
    rollout_corr/log_ppl_abs_diff                |mean of d over the sequence|, then the mean over sequences
    rollout_corr/chi2_token                      mean(rho^2) - 1
    rollout_corr/rollout_is_mean                 mean(rho), before the cap
    rollout_corr/rollout_is_ratio_fraction_high  share of tokens with rho > cap
    train_rollout_logprob_abs_diff               mean |d|; with _max: the largest |d|
    token_mult_prob_error                        mean(exp |d|); 1 is no mismatch

The figures only mean something with the forward they come from: ``logp_train`` of a guided forward replays the rollout's
rounding. The figures of the forward without guidance carry the prefix ``unguided/``. All of them are sums and counts over the
tokens (or sequences) of a micro-batch; ``trace_jax.metrics.combine`` joins them and ``finalize`` divides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32

from trace_jax.metrics.weighted import MaxMetric, Stats, WeightedMetric, finalize
from trace_jax.rl.aggregation import token_count
from trace_jax.rl.ratios import clamp, masked_log_ratio
from trace_jax.rl.sequences import sequence_sums

__all__ = ["answer_positions", "entropy_stats", "finalize", "mismatch_stats", "position_gap_stats"]


def mismatch_stats(
    logp_train: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    cap: float = 5.0,
    prefix: str = "",
) -> Stats:
    """The statistics listed at the top of this file.

    Args:
        logp_train: the trainer's log-probs, at the sampling temperature.
        logp_rollout: the log-probs that the engine returned.
        mask: true on sampled tokens; a sequence without a sampled token counts as none.
        segment_ids: 1, 2, ... for the sequences of a packed row, 0 at padding; None where one row is one sequence.
        cap: the cap of the importance weight, for ``rollout_is_ratio_fraction_high``.
        prefix: put before every name, such as ``unguided/``.

    Returns:
        Sums and counts by metric name.
    """
    tokens = token_count(mask)
    gap = masked_log_ratio(logp_train, logp_rollout, mask)
    bounded = clamp(gap)
    ratio = jnp.exp(bounded)

    def token_average(values: Float32[Array, "B T"]) -> WeightedMetric:
        return WeightedMetric(jnp.sum(jnp.where(mask, values, 0.0)), tokens)

    length = sequence_sums(mask.astype(jnp.int32), segment_ids)
    sequence_gap = jnp.abs(sequence_sums(gap, segment_ids)) / jnp.maximum(length, 1).astype(jnp.float32)
    stats: Stats = {
        "rollout_corr/kl": token_average(-gap),
        "rollout_corr/k3_kl": token_average(_k3(bounded)),
        "rollout_corr/log_ppl_abs_diff": WeightedMetric(jnp.sum(sequence_gap), jnp.sum((length > 0).astype(jnp.int32))),
        # expm1(2 d) is rho^2 - 1 without the cancellation near d = 0.
        "rollout_corr/chi2_token": token_average(jnp.expm1(2.0 * bounded)),
        "rollout_corr/rollout_is_mean": token_average(ratio),
        "rollout_corr/rollout_is_ratio_fraction_high": token_average((ratio > cap).astype(jnp.float32)),
        "train_rollout_logprob_abs_diff": token_average(jnp.abs(gap)),
        "train_rollout_logprob_abs_diff_max": MaxMetric(jnp.max(jnp.abs(gap), initial=0.0)),
        "token_mult_prob_error": token_average(jnp.exp(jnp.abs(bounded))),
    }
    return {prefix + name: metric for name, metric in stats.items()}


def entropy_stats(entropy: Float32[Array, "B T"], mask: Bool[Array, "B T"]) -> Stats:
    """``policy/entropy``: mean over sampled tokens of the entropy (nats) of the distribution each was drawn from.

    ``entropy[b, t]`` must belong to token t, so it comes from the logits at t - 1, like the token's log-prob.
    """
    return {"policy/entropy": WeightedMetric(jnp.sum(jnp.where(mask, entropy, 0.0)), token_count(mask))}


def answer_positions(mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None) -> Int32[Array, "B T"]:
    """Index of each sampled token among the sampled tokens of its sequence, from 0; -1 where the mask is false."""
    before = jnp.cumsum(mask.astype(jnp.int32), axis=1) - mask.astype(jnp.int32)
    if segment_ids is not None:
        # What a row counted before a sequence began stays in force until the next one begins, because it never falls.
        begins = segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        before = before - jax.lax.cummax(jnp.where(begins, before, 0), axis=1)
    return jnp.where(mask, before, -1)


def position_gap_stats(
    logp_train: Float32[Array, "B T"],
    logp_rollout: Float32[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    num_positions: int,
) -> Stats:
    """Mismatch by token index in the answer: does the gap grow with the length?

    Args:
        logp_train, logp_rollout, mask, segment_ids: as in ``mismatch_stats``.
        num_positions: P; tokens with a later index are left out.

    Returns:
        ``position/train_rollout_logprob_abs_diff`` (mean |d|), ``position/rollout_corr/kl`` (mean -d) and
        ``position/rollout_corr/k3_kl``, each with sum f32[P] and count i32[P]; ``WeightedMetric.mean()`` gives [P] values.
    """
    gap = masked_log_ratio(logp_train, logp_rollout, mask)
    # Index P is out of range on purpose: the scatter drops it (a negative index would wrap around).
    index = jnp.where(mask, answer_positions(mask, segment_ids), num_positions)
    count = jnp.zeros(num_positions, jnp.int32).at[index].add(1, mode="drop")

    def by_position(values: Float32[Array, "B T"]) -> WeightedMetric:
        return WeightedMetric(jnp.zeros(num_positions, jnp.float32).at[index].add(values, mode="drop"), count)

    return {
        "position/train_rollout_logprob_abs_diff": by_position(jnp.abs(gap)),
        "position/rollout_corr/kl": by_position(-gap),
        "position/rollout_corr/k3_kl": by_position(_k3(clamp(gap))),
    }


def _k3(gap: Float32[Array, "B T"]) -> Float32[Array, "B T"]:
    """exp(d) - 1 - d. Below 0.1 by its series: the plain form loses all digits in float32 near 1e-4, and its sign."""
    series = gap * gap * (1 / 2 + gap * (1 / 6 + gap * (1 / 24 + gap / 120)))
    return jnp.where(jnp.abs(gap) < 0.1, series, jnp.expm1(gap) - gap)
