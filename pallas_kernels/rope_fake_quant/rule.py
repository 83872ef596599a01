"""Rotary positions with products and sums that every compiler evaluates to the same bits, shared by the model and the kernel.

1. The angles, their cosines and their sines are XLA's in every implementation: arrays of their own (`rope_tables`), since a sine is another
   number on another device, and fused with something it need not be the same one.
2. Each of the two products counts as zero where it is subnormal. That is also what keeps a compiler from fusing it with the sum.
3. The sum is rounded once, to float32, and then to the dtype of x.

Source: Su et al., RoFormer, arXiv 2104.09864, in the half-split layout of Hugging Face checkpoints.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import flushed
from pallas_kernels.rounding import as_stored, keep_rounding


def rope_tables(
    positions: Int[Array, "*tokens"], head_dim: int, theta: float
) -> tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]:
    """Cosines and sines, float32, of the angles `position * theta**(-2i/head_dim)` by which the pairs of a head are rotated."""
    half = head_dim // 2
    frequency = jnp.power(jnp.float32(theta), -(jnp.arange(half, dtype=jnp.float32) / half))
    angle = positions.astype(jnp.float32)[..., None] * frequency.reshape((1,) * positions.ndim + (half,))
    return jax.lax.optimization_barrier((flushed(jnp.cos(angle)), flushed(jnp.sin(angle))))


def turned(own: Float[Array, "*s"], other: Float[Array, "*s"], cos: Float[Array, "*#s"], sin: Float[Array, "*#s"]) -> Float[Array, "*s"]:
    """own cos + other sin in float32, every subnormal counting as zero: the first of a pair with -sin, the second with sin.

    A subnormal value needs no look of its own, since no cosine is larger than one and makes more of it.
    """
    return flushed(flushed(own * cos) + flushed(other * sin))


def rotate(
    x: Float[Array, "*tokens heads head_dim"], cos: Float[Array, "*tokens half"], sin: Float[Array, "*tokens half"]
) -> Float[Array, "*tokens heads head_dim"]:
    """x with the pairs (i, i + head_dim/2) of every head rotated by `rope_tables`, in the dtype of x."""
    first, second = jnp.split(as_stored(x), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([turned(first, second, cos, -sin), turned(second, first, cos, sin)], axis=-1)
    return keep_rounding(rotated.astype(x.dtype))
