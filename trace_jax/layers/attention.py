"""Grouped-query attention over keys and values that may come from a cache."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int


def attend(
    query: Float[Array, "B T H head_dim"],
    key: Float[Array, "B S K head_dim"],
    value: Float[Array, "B S K head_dim"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H head_dim"]:
    """Scaled dot-product attention; scores and softmax in float32, result in the dtype of `query`.

    Args:
      mask: true where a query may look at a key. A row without any true entry (padding) yields finite numbers of no meaning.
    """
    with jax.numpy_dtype_promotion("standard"):  # jax's own code mixes bfloat16 with float32 and must run under strict promotion too
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")


def causal_mask(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Tokens see the tokens of their own segment at the same or an earlier position; segment 0 is padding."""
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    earlier = positions[:, :, None] >= positions[:, None, :]
    real = segment_ids[:, None, :] > 0
    return same_segment & earlier & real
