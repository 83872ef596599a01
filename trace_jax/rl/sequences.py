"""Sums over the sequences of a batch, whether a row is one sequence or several are packed into it.

`segment_ids` are 1, 2, ... for the sequences of a packed row and 0 at padding; None where one row is one sequence. What a
sequence is summed to does not depend on where it lies.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def sequence_sums(values: Shaped[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> Shaped[Array, " S"]:
    """The sum over each sequence; slots without a sequence hold 0. A row of T tokens has at most T sequences."""
    if segment_ids is None:
        return jnp.sum(values, axis=1)
    rows, slots = values.shape[0], values.shape[1] + 1
    return jax.ops.segment_sum(values.reshape(-1), _slot(segment_ids).reshape(-1), num_segments=rows * slots)


def sequence_totals(values: Shaped[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> Shaped[Array, "B T"]:
    """At every token, the sum over the sequence that it belongs to."""
    sums = sequence_sums(values, segment_ids)
    return jnp.broadcast_to(sums[:, None], values.shape) if segment_ids is None else sums[_slot(segment_ids)]


def _slot(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token's sequence among all sequences of the batch."""
    rows, slots = segment_ids.shape[0], segment_ids.shape[1] + 1
    return jnp.arange(rows, dtype=segment_ids.dtype)[:, None] * slots + segment_ids
