"""Policy losses: an objective per token each, and their composition with ratio, weight and sum.

`algorithm.name` stands for settings of these parts (`trace_jax.config.presets`):

    grpo, dr_grpo, dapo   ppo_clip on the token ratio
    gspo                  ppo_clip on the geometric mean over the sequence
    cispo                 cispo
    trust_band            ppo_clip on the geometric mean, with a band for negative advantages
"""

from trace_jax.rl.losses.cispo import cispo
from trace_jax.rl.losses.objective import TokenObjective
from trace_jax.rl.losses.policy_loss import LossKind, PolicyLoss, policy_loss_sum
from trace_jax.rl.losses.ppo_clip import ppo_clip

__all__ = ["LossKind", "PolicyLoss", "TokenObjective", "cispo", "policy_loss_sum", "ppo_clip"]
