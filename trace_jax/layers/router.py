"""Top-k routing, free or replayed (R3: Ma et al., arXiv 2510.11370), by softmax or by biased sigmoid scores."""

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
    chosen, own = _choose(probabilities, experts_per_token, replay)
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights, own


def route_by_biased_sigmoid(
    logits: Float[Array, "*tokens E"],
    bias: Float[Array, " E"],
    experts_per_token: int,
    *,
    groups: int,
    kept_groups: int,
    norm_topk_prob: bool,
    scale: float,
    replay: Int[Array, "*tokens k"] | None = None,
) -> tuple[Int[Array, "*tokens k"], Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """Selects experts by sigmoid scores plus a bias that balances their load; the weights are the scores without it.

    Source: DeepSeek-V3 technical report, arXiv 2412.19437.

    Args:
      logits, experts_per_token, norm_topk_prob, replay: as for `route`.
      bias: added for the choice only, so that no gradient reaches it; float32.
      groups: into how many equal groups the experts are divided.
      kept_groups: experts come from the groups with the largest sums of their two best scores, so many of them.
      scale: factor of the weights.

    Returns:
      As `route`.
    """
    scores = jax.nn.sigmoid(logits)
    ranked = scores + bias[(None,) * (scores.ndim - 1)]
    if kept_groups < groups:
        grouped = ranked.reshape(*ranked.shape[:-1], groups, -1)
        best_two = jnp.sum(jax.lax.top_k(jax.lax.stop_gradient(grouped), 2)[0], axis=-1)
        kept = jnp.sum(jax.nn.one_hot(jax.lax.top_k(best_two, kept_groups)[1], groups, dtype=jnp.float32), axis=-2)
        ranked = jnp.where(kept[..., None] > 0, grouped, -jnp.inf).reshape(ranked.shape)
    chosen, own = _choose(ranked, experts_per_token, replay)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * scale, own


def _choose(
    ranked: Float[Array, "*tokens E"], experts_per_token: int, replay: Int[Array, "*tokens k"] | None
) -> tuple[Int[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """The experts to use, and the router's own choice: those with the largest values, except where rows are replayed."""
    own = jax.lax.top_k(jax.lax.stop_gradient(ranked), experts_per_token)[1].astype(jnp.int32)
    if replay is None:
        return own, own
    known = jnp.all(replay >= 0, axis=-1, keepdims=True)
    return jnp.where(known, replay, own), own
