"""Decode attention in jnp: dequantize everything, then a masked softmax in float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.containers import Quantized
from pallas_kernels.decode_attention.paged_kv import PagedKV, words_to_codes, words_to_scales
from pallas_kernels.dequantize.api import dequantize


@functools.partial(jax.jit, static_argnames="scale")
def decode_attention(query: Float[Array, "B H D"], cache: PagedKV, scale: float) -> Float[Array, "B H D"]:
    """The attention output in the query's dtype."""
    (batch, heads, size), kv_heads = query.shape, cache.key_codes.shape[1]

    def side(words, scales, multiplier):
        """float32[B, K, S, D]: the dequantized tokens of each sequence in order, zero beyond its length."""
        q = Quantized(words_to_codes(words), words_to_scales(scales), multiplier, size, cache.fmt)
        table = jnp.clip(cache.page_table, 0, words.shape[0] - 1)
        tokens = dequantize(q, jnp.float32, implementation="reference")[table]
        tokens = jnp.moveaxis(tokens, 2, 1).reshape((batch, kv_heads, -1, size))
        return jnp.where(present[:, None, :, None], tokens, 0.0)

    slots = cache.page_table.shape[1] * cache.page_size
    present = jnp.arange(slots, dtype=jnp.int32)[None] < cache.lengths[:, None]
    k = side(cache.key_codes, cache.key_scales, cache.key_multiplier)
    v = side(cache.value_codes, cache.value_scales, cache.value_multiplier)
    grouped = query.astype(jnp.float32).reshape((batch, kv_heads, heads // kv_heads, size))
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, k, precision="highest") * scale
    scores = jnp.where(present[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkgs,bksd->bkgd", weights, v, precision="highest") / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(query.shape).astype(query.dtype)
