"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import keep_rounding


def apply_rope(x: Float[Array, "B T heads head_dim"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T heads head_dim"]:
    """Rotates pairs (i, i + head_dim/2) of every head by `position * theta**(-2i/head_dim)`.

    Angles and products are float32; the result has the dtype of `x`. Source: Su et al., RoFormer, arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / half
    inverse_frequency = jnp.power(jnp.float32(theta), -exponent)
    angle = positions.astype(jnp.float32)[:, :, None, None] * inverse_frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return keep_rounding(rotated.astype(x.dtype))
