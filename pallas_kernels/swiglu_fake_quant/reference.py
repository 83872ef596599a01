"""SwiGLU and the rounding in jnp, one after the other."""

import functools

import jax
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.fake_quant import reference as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.swiglu_fake_quant.rule import swiglu


@functools.partial(jax.jit, static_argnames="fmt")
def swiglu_fake_quant(
    gate: BFloat16[Array, "*rows d"], up: BFloat16[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat
) -> BFloat16[Array, "*rows d"]:
    """SwiGLU rounded to the format under an aligned multiplier."""
    return nearest.fake_quant(swiglu(gate, up), multiplier, fmt)
