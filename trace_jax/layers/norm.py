"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import as_stored, keep_rounding


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Normalises the last axis in float32 and scales it; the result has the dtype of `x`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    wide = as_stored(x)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(eps))
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return keep_rounding((wide * inverse_rms * scale).astype(x.dtype))
