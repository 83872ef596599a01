"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.rope_fake_quant import rule


def apply_rope(x: Float[Array, "B T heads head_dim"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T heads head_dim"]:
    """Rotates pairs (i, i + head_dim/2) of every head by `position * theta**(-2i/head_dim)`.

    Angles and products are float32; the result has the dtype of `x`. Source: Su et al., RoFormer, arXiv 2104.09864.
    """
    return rule.rotate(x, *rule.rope_tables(positions, x.shape[-1], theta))
