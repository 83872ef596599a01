"""Grouped-query attention over keys and values that may come from a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import keep_rounding

HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a key that a query may not look at; finite, so that a row without any key gives finite numbers."""


def attend(
    query: Float[Array, "B T H head_dim"],
    key: Float[Array, "B S K head_dim"],
    value: Float[Array, "B S K v_dim"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H v_dim"]:
    """Scaled dot-product attention; scores and softmax in float32, result in the dtype of `query`.

    Args:
      mask: true where a query may look at a key. A row without any true entry (padding) yields finite numbers of no meaning.
      scale: factor of the scores; None for `head_dim**-0.5`.
      sinks: a score of every head that takes weight and has no value (Agarwal et al., gpt-oss, arXiv 2508.10925); None without.
    """
    batch, tokens, heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, head_dim)
    factor = head_dim**-0.5 if scale is None else scale
    scores = jnp.einsum("BTKGh,BSKh->BKGTS", grouped, key, preferred_element_type=jnp.float32) * factor
    scores = jnp.where(mask[:, None, None], scores, HIDDEN)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        own = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, key.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)[..., :-1]
    attended = jnp.einsum("BKGTS,BSKh->BTKGh", keep_rounding(weights.astype(key.dtype)), value)
    return keep_rounding(attended.reshape(batch, tokens, heads, -1).astype(query.dtype))


def causal_mask(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Tokens see the tokens of their own segment at the same or an earlier position; segment 0 is padding."""
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    earlier = positions[:, :, None] >= positions[:, None, :]
    real = segment_ids[:, None, :] > 0
    return same_segment & earlier & real
