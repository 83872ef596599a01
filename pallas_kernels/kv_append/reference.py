"""Appending in jnp: quantize, then scatter."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode_attention.paged_kv import PagedKV, codes_to_words, scales_to_words
from pallas_kernels.quantize.api import quantize


@jax.jit
def append(
    cache: PagedKV, keys: Float[Array, "B T K D"], values: Float[Array, "B T K D"], pages: Int32[Array, "B T"], slots: Int32[Array, "B T"]
) -> PagedKV:
    """The cache with tokens written at (page, slot); page -1 is dropped."""
    # A negative index would count from the end; one beyond the end is dropped.
    index = jnp.where(pages < 0, cache.key_codes.shape[0], pages), slice(None), slots

    def write(codes, scales, x, multiplier):
        q = quantize(x, cache.fmt, multiplier, implementation="reference")
        put = [(codes, codes_to_words(q.codes)), (scales, scales_to_words(q.scales))]
        return [page.at[index].set(update, mode="drop") for page, update in put]

    key_codes, key_scales = write(cache.key_codes, cache.key_scales, keys, cache.key_multiplier)
    value_codes, value_scales = write(cache.value_codes, cache.value_scales, values, cache.value_multiplier)
    return dataclasses.replace(cache, key_codes=key_codes, key_scales=key_scales, value_codes=value_codes, value_scales=value_scales)
