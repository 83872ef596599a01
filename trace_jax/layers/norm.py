"""Root-mean-square normalisation."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.rms_norm_fake_quant import rule


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Normalises the last axis in float32 and scales it; the result has the dtype of `x`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    return rule.rms_norm(x, weight, rule.inverse_rms(x, eps))
