"""Fake quantization in jnp: the values of `quantize` without building its codes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import ladder
from pallas_kernels.arithmetic import float_bits, magnitude_bits, signed_value
from pallas_kernels.blocks import join_blocks, per_block, split_blocks
from pallas_kernels.fake_quant.rule import nearest_terms
from pallas_kernels.formats import BlockFormat


@functools.partial(jax.jit, static_argnames="fmt")
def fake_quant(x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat) -> Float[Array, "*rows d"]:
    """x rounded to the format under an aligned multiplier (`resolve_multiplier`), in the dtype of x."""
    blocks = split_blocks(x, fmt)
    magnitudes = magnitude_bits(blocks)
    amax = jnp.max(magnitudes, axis=-1, keepdims=True)
    multiplier = None if multiplier is None else per_block(multiplier)
    value, factor, pre = nearest_terms(magnitudes, amax, multiplier, fmt, ladder)
    return join_blocks(signed_value(value, float_bits(blocks), factor, pre), x.shape[-1]).astype(x.dtype)
