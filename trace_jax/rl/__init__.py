"""Reinforcement learning as pure functions of arrays: rewards, advantages, corrections, losses, diagnostics.

No function here calls a model. Arrays are [B, T] (sequences, tokens), padded, with a boolean mask that is true on the
sampled tokens, the only ones that enter the loss. Values where the mask is false are never read, NaN included.

What belongs to a whole sequence (a ratio, a divisor) is summed by `segment_ids` where several sequences share a row.
"""

from trace_jax.rl.advantages import frac_reward_zero_std, group_advantages, groups_with_signal
from trace_jax.rl.aggregation import batch_total, normalized, sequence_divisors, token_count
from trace_jax.rl.corrections import Correction, correction_stats, rollout_weights
from trace_jax.rl.diagnostics import answer_positions, entropy_stats, finalize, mismatch_stats, position_gap_stats
from trace_jax.rl.losses import PolicyLoss, TokenObjective, cispo, policy_loss_sum, ppo_clip
from trace_jax.rl.overlong import overlong_penalty
from trace_jax.rl.ratios import LOG_RATIO_LIMIT, at_level, policy_log_ratio

__all__ = [
    "Correction",
    "LOG_RATIO_LIMIT",
    "PolicyLoss",
    "TokenObjective",
    "answer_positions",
    "at_level",
    "batch_total",
    "cispo",
    "correction_stats",
    "entropy_stats",
    "finalize",
    "frac_reward_zero_std",
    "group_advantages",
    "groups_with_signal",
    "mismatch_stats",
    "normalized",
    "overlong_penalty",
    "policy_log_ratio",
    "policy_loss_sum",
    "position_gap_stats",
    "ppo_clip",
    "rollout_weights",
    "sequence_divisors",
    "token_count",
]
