"""Sampling of the next token, with the log-probability under the distribution sampled from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    temperature: Float[Array, " B"],
    top_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
    *,
    truncated: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row.

    Args:
      logits: float32.
      keys: one key per row, so that a row's draw does not depend on its neighbours.
      temperature: 0 takes the most likely token; its log-probability is then that of the untempered distribution.
      top_p: keeps the smallest set of most likely tokens whose probability reaches `top_p`; 1 keeps all.
      top_k: keeps the k most likely tokens; 0 or less keeps all.
      truncated: static; whether any row uses top-p or top-k (the sort is skipped otherwise).

    Returns:
      Tokens (int32) and their log-probabilities (float32) under the tempered, truncated, renormalised distribution.
    """
    greedy = temperature <= 0
    logp = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, temperature)[:, None], axis=-1)
    if truncated:
        shortened = ((top_p < 1) | (top_k > 0))[:, None]  # other rows keep their bits, whatever their neighbours ask for
        logp = jnp.where(shortened, jax.nn.log_softmax(jnp.where(_kept(logp, top_p, top_k), logp, -jnp.inf), axis=-1), logp)
    drawn = jax.vmap(jax.random.categorical)(keys, logp)
    token = jnp.where(greedy, jnp.argmax(logp, axis=-1), drawn).astype(jnp.int32)
    return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]


def _kept(logp: Float[Array, "B V"], top_p: Float[Array, " B"], top_k: Int[Array, " B"]) -> Bool[Array, "B V"]:
    vocabulary = logp.shape[-1]
    order = jnp.argsort(-logp, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logp, order, axis=-1)
    mass_before = jnp.cumsum(jnp.exp(ranked), axis=-1) - jnp.exp(ranked)
    rank = jnp.arange(vocabulary, dtype=jnp.int32)[None, :]
    limit = jnp.where(top_k > 0, top_k, vocabulary)[:, None]
    keep_ranked = ((mass_before < top_p[:, None]) | (top_p[:, None] >= 1)) & (rank < limit)
    keep_ranked = keep_ranked | (rank == 0)
    rows = jnp.arange(logp.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(keep_ranked).at[rows, order].set(keep_ranked)
