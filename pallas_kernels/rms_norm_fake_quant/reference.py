"""The norm and the rounding in jnp, one after the other."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.fake_quant import reference as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant import reference as guided
from pallas_kernels.rms_norm_fake_quant.rule import rms_norm


@functools.partial(jax.jit, static_argnames=("kind", "fmt"))
def rms_norm_fake_quant(
    x: Float[Array, "*rows d"],
    weight: Float[Array, " d"],
    inverse_rms: Float[Array, "*rows 1"],
    rounding: tuple[Any, ...],
    kind: str | None,
    fmt: BlockFormat,
) -> Float[Array, "*rows d"]:
    """The rounded norm, in the dtype of x.

    Args:
      rounding: what `fake_quant` or `guided_fake_quant` takes after its tensor and before kind and format.
      kind: of the record; None rounds to the nearest code.
    """
    normed = rms_norm(x, weight, inverse_rms)
    if kind is None:
        return nearest.fake_quant(normed, *rounding, fmt)
    return guided.guided_fake_quant(normed, *rounding, kind, fmt)
