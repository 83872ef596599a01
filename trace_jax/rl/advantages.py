"""Group-relative advantages (GRPO), on the host and exact.

Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.2: A_i = (R_i - mean(R)) / std(R) within the group of
answers to one prompt. The paper leaves the std open; like verl and TRL this is the sample std (n - 1), plus ``eps``.
"""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int64

from trace_jax.errors import UserError


def group_advantages(
    rewards: Float32[np.ndarray, " B"],
    group: Int64[np.ndarray, " B"],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Float32[np.ndarray, " B"]:
    """Normalises rewards inside each group.

    Computed in float64 with correctly rounded sums, so the result does not depend on the order of the sequences. It needs
    the whole batch: call it before sharding, then shard the result.

    Args:
        rewards: f32[B], one per sequence. NaN means that the verifier failed: the sequence is left out of the group's
            statistics and gets advantage 0, which is not the same as a wrong answer.
        group: int64[B], equal for the answers to one prompt; in any order, groups may differ in size.
        normalize_std: divide by std + eps. Without it (Dr. GRPO, arXiv 2503.20783) only the mean is removed.
        eps: added to the std, in units of reward.

    Returns:
        f32[B]. Exactly 0 in a group whose valid rewards are all equal, and in a group with fewer than two of them.

    Raises:
        ValueError: if the shapes differ.
        UserError: if a reward is infinite.
    """
    advantages = np.zeros(rewards.shape, np.float32)
    for rows in _valid_groups(rewards, group):
        values = rewards[rows].astype(np.float64)
        # Compared before any arithmetic: the std of equal rewards can round to something that is not 0.
        if values.min() == values.max():
            continue
        centred = values - math.fsum(values) / len(values)
        if normalize_std:
            std = math.sqrt(math.fsum(centred * centred) / (len(values) - 1))
            centred = centred / (std + eps)
        advantages[rows] = centred
    return advantages


def groups_with_signal(rewards: Float32[np.ndarray, " B"], group: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " G"]:
    """Ids of the groups whose valid rewards are not all equal, ascending: those that these rewards give an advantage other than 0."""
    found = [group[rows[0]] for rows in _valid_groups(rewards, group) if rewards[rows].min() != rewards[rows].max()]
    return np.asarray(found, np.int64)


def frac_reward_zero_std(rewards: Float32[np.ndarray, " B"], group: Int64[np.ndarray, " B"]) -> float:
    """Share of groups whose valid rewards are all equal, among the groups with a valid reward; NaN if there is none."""
    constant = [rewards[rows].min() == rewards[rows].max() for rows in _valid_groups(rewards, group)]
    return sum(constant) / len(constant) if constant else math.nan


def _valid_groups(rewards: Float32[np.ndarray, " B"], group: Int64[np.ndarray, " B"]) -> Iterator[np.ndarray]:
    """The row indices of each group's valid rewards, for groups that have one."""
    if rewards.shape != group.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and group {group.shape} must both have shape [B]")
    if np.isinf(rewards).any():
        raise UserError(
            f"the reward of sequence {int(np.flatnonzero(np.isinf(rewards))[0])} is infinite; "
            "the task's reward must be a finite number, or NaN when it could not be computed"
        )
    valid = np.flatnonzero(~np.isnan(rewards))
    order = valid[np.argsort(group[valid], kind="stable")]
    starts = np.flatnonzero(np.diff(group[order])) + 1
    return (rows for rows in np.split(order, starts) if len(rows))
