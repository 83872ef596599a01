"""Reinforcement learning as pure functions of arrays: advantages, corrections, losses, diagnostics.

No function here calls a model. Arrays are [B, T] (sequences, tokens), padded, with a boolean mask that is true on the
sampled tokens, the only ones that enter the loss. Values where the mask is false are never read, NaN included.
"""

from trace_jax.rl.advantages import frac_reward_zero_std, group_advantages
from trace_jax.rl.corrections import LOG_RATIO_LIMIT, rollout_weights
from trace_jax.rl.diagnostics import answer_positions, entropy_stats, finalize, mismatch_stats, position_gap_stats
from trace_jax.rl.losses import ppo_clip_loss_sum, token_count, token_mean

__all__ = [
    "LOG_RATIO_LIMIT",
    "answer_positions",
    "entropy_stats",
    "finalize",
    "frac_reward_zero_std",
    "group_advantages",
    "mismatch_stats",
    "position_gap_stats",
    "ppo_clip_loss_sum",
    "rollout_weights",
    "token_count",
    "token_mean",
]
