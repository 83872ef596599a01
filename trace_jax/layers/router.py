"""Top-k routing, free or replayed (R3: Ma et al., arXiv 2510.11370)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route(
    logits: Float[Array, "*tokens E"],
    experts_per_token: int,
    norm_topk_prob: bool,
    replay: Int[Array, "*tokens k"] | None = None,
) -> tuple[Int[Array, "*tokens k"], Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """Selects experts and their mixing weights.

    Args:
      logits: router output in float32.
      experts_per_token: k.
      norm_topk_prob: whether the selected probabilities are rescaled to sum to one.
      replay: expert ids to use instead of the router's own choice; rows that hold -1 choose freely. The weights always
        come from the full softmax at the chosen ids, so that the gradient reaches the router.

    Returns:
      Expert ids used (int32), their weights (float32), and the router's own choice, each `[*tokens, k]`.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), experts_per_token)
    own = own.astype(jnp.int32)
    chosen = own
    if replay is not None:
        known = jnp.all(replay >= 0, axis=-1, keepdims=True)
        chosen = jnp.where(known, replay, chosen)
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights, own
