"""From a loss per token to one number: sums now, one division by a figure of the whole batch.

    token_mean                sum over tokens / tokens                     DAPO, arXiv 2503.14476, equation 12
    seq_mean_token_mean       mean over sequences of their token means     GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071
    seq_mean_token_sum_norm   sum over tokens / (sequences * constant)     Dr. GRPO, arXiv 2503.20783

The names are verl's. A micro-batch sums `loss_t / divisor` with the divisor of the token's sequence, and the sums are divided by the
total of the whole batch. It never divides by a figure of its own, so the loss and its gradient are the same for any micro-batch size,
any number of shards, any packing and any padding. A sequence without a sampled token counts as none.
"""

from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def sequence_divisors(lengths: Int64[np.ndarray, " B"], aggregation: Aggregation) -> Float32[np.ndarray, " B"] | None:
    """What the tokens of each sequence are divided by, or None where it is 1 for all; lengths are sampled tokens."""
    return np.maximum(lengths, 1).astype(np.float32) if aggregation == "seq_mean_token_mean" else None


def batch_total(lengths: Int64[np.ndarray, " B"], aggregation: Aggregation, loss_scale_factor: int = 1) -> int:
    """What the sum over the whole batch is divided by.

    Args:
        lengths: sampled tokens of every sequence of the batch.
        aggregation: see the top of this file.
        loss_scale_factor: the constant of `seq_mean_token_sum_norm`, in tokens.
    """
    if aggregation == "token_mean":
        return int(lengths.sum())
    sequences = int(np.count_nonzero(lengths))
    return sequences * loss_scale_factor if aggregation == "seq_mean_token_sum_norm" else sequences


def token_count(mask: Bool[Array, "B T"]) -> Int32[Array, ""]:
    """Number of tokens in the loss."""
    return jnp.sum(mask.astype(jnp.int32))


def normalized(loss_sum: Float32[Array, ""], total: Int32[Array, ""] | Float32[Array, ""] | int) -> Float32[Array, ""]:
    """loss_sum / total, where the total is that of the whole batch on all devices; 0 for an empty batch."""
    return loss_sum / jnp.maximum(jnp.asarray(total).astype(jnp.float32), 1.0)
