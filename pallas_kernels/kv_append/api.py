"""`append`: the user's function."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode_attention.paged_kv import PagedKV
from pallas_kernels.implementation import dispatch
from pallas_kernels.kv_append import reference


def append(
    cache: PagedKV,
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    positions: Int32[Array, "B T"],
    *,
    implementation: str | None = None,
) -> PagedKV:
    """Quantizes new keys and values and writes them into their pages.

    The bytes are those of `pallas_kernels.quantize` under the cache's multipliers. Donate the cache (`jax.jit(...,
    donate_argnums=...)`) and the pages are written in place.

    Args:
      cache: the cache; two sequences may share a page, but not a slot that is written here.
      keys: bfloat16 after RoPE, T new tokens of each sequence.
      values: bfloat16.
      positions: int32, the position of each token in its sequence; no two of a sequence are equal. A position that is negative,
        beyond the page table or on a page number outside 0..pages-1 is dropped: nothing is written and no length changes.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      The cache with the tokens in it; a sequence's length becomes its largest written position + 1, if that is more.

    Raises:
      ValueError: keys, values and cache do not belong together.
      NotImplementedError: the asked-for implementation cannot serve, with the reason.
    """
    batch, kv_heads = cache.page_table.shape[0], cache.key_codes.shape[1]
    expected = (*positions.shape, kv_heads, cache.head_dim)
    if keys.shape != expected or values.shape != expected or positions.shape[0] != batch:
        raise ValueError(
            f"keys {keys.shape} and values {values.shape} at positions {positions.shape} do not fit a cache of {batch} sequences, "
            f"{kv_heads} KV heads and head_dim {cache.head_dim}; pass [B, T, K, D] and [B, T]"
        )
    pages, slots, kept = _places(cache, positions)
    arguments = cache, jax.lax.stop_gradient(keys), jax.lax.stop_gradient(values), pages, slots

    def pallas():
        from pallas_kernels.kv_append import pallas as kernel

        return kernel.append(*arguments)

    written = dispatch("append", implementation, reference=lambda: reference.append(*arguments), pallas=pallas)
    reached = jnp.max(jnp.where(kept, positions + 1, 0), axis=1, initial=0)
    return dataclasses.replace(written, lengths=jnp.maximum(cache.lengths, reached))


def _places(cache: PagedKV, positions: Int32[Array, "B T"]):
    """(page, slot, whether the token is kept) of each position; the page of a dropped token is -1."""
    column = positions // cache.page_size
    inside = (positions >= 0) & (column < cache.page_table.shape[1])
    page = jnp.take_along_axis(cache.page_table, jnp.where(inside, column, 0), axis=1)
    kept = inside & (page >= 0) & (page < cache.key_codes.shape[0])
    return jnp.where(kept, page, -1), jnp.where(kept, positions % cache.page_size, 0), kept
