"""The norm, in two parts: a number for each row, and arithmetic on every value that the jnp reference and the Pallas body share.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import flushed
from pallas_kernels.rounding import as_stored, keep_rounding


def inverse_rms(x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows 1"]:
    """1 / sqrt(mean(x^2) + eps) of each row, float32."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(as_stored(x)), axis=-1, keepdims=True) + jnp.float32(eps))


def scaled(x: Float[Array, "*s"], inverse: Float[Array, "*#s"], weight: Float[Array, "*#s"]) -> Float[Array, "*s"]:
    """The normalised values in float32, the products in this order, every subnormal counting as zero; no weight may be one."""
    return flushed(flushed(flushed(x) * inverse) * weight)


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, " d"], inverse: Float[Array, "*rows 1"]) -> Float[Array, "*rows d"]:
    """x normalised in float32 by its `inverse_rms`, scaled, and rounded to its dtype."""
    weight = flushed(weight.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + weight.shape)
    return keep_rounding(scaled(as_stored(x), inverse, weight).astype(x.dtype))
