"""Both roundings in jnp, one after the other."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fake_quant import reference as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.residual_fake_quant.rule import residual, residual_multiplier


@functools.partial(jax.jit, static_argnames="fmt")
def residual_fake_quant(
    x: Float[Array, "*rows d"], channels: Int[Array, " c"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows c"]]:
    """(Q(x), Q(R[..., channels])) under an aligned multiplier (`resolve_multiplier`), in the dtype of x."""
    rounded = nearest.fake_quant(x, multiplier, fmt)
    left = jnp.take(residual(x, rounded), channels, axis=-1, mode="clip")
    return rounded, nearest.fake_quant(left, None if multiplier is None else residual_multiplier(multiplier), fmt)
