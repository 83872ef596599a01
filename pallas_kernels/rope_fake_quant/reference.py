"""The rotation and the rounding in jnp, one after the other."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.fake_quant import reference as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant import reference as guided
from pallas_kernels.rope_fake_quant.rule import rotate


@functools.partial(jax.jit, static_argnames=("kind", "fmt"))
def rope_fake_quant(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
    rounding: tuple[Any, ...],
    kind: str | None,
    fmt: BlockFormat,
) -> Float[Array, "*tokens heads head_dim"]:
    """The rounded rotation, in the dtype of x; `rounding` and `kind` as in `rms_norm_fake_quant`."""
    rotated = rotate(x, cos, sin)
    if kind is None:
        return nearest.fake_quant(rotated, *rounding, fmt)
    return guided.guided_fake_quant(rotated, *rounding, kind, fmt)
