"""Fake quantization in jnp: the values of `quantize` without building its codes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import (
    bits_float,
    decode_terms,
    encode_gain,
    encode_terms,
    float_bits,
    magnitude_bits,
    scale_code,
    signed_value,
)
from pallas_kernels.blocks import join_blocks, per_block, split_blocks
from pallas_kernels.formats import BlockFormat
from pallas_kernels.ladder import nearest_value


@functools.partial(jax.jit, static_argnames="fmt")
def fake_quant(x: Float[Array, "*rows d"], multiplier: Float[Array, "*m"] | None, fmt: BlockFormat) -> Float[Array, "*rows d"]:
    """x rounded to the format under an aligned multiplier (`resolve_multiplier`), in the dtype of x."""
    blocks = split_blocks(x, fmt)
    magnitudes = magnitude_bits(blocks)
    amax = jnp.max(magnitudes, axis=-1, keepdims=True)
    multiplier = per_block(multiplier)
    gain = None if multiplier is None else encode_gain(multiplier)
    scales = scale_code(amax, gain)
    gain, step = encode_terms(scales, gain)
    value = nearest_value(bits_float(magnitudes) * gain, step, fmt)
    factor, pre = decode_terms(scales, multiplier)
    return join_blocks(signed_value(value, float_bits(blocks), factor, pre), x.shape[-1]).astype(x.dtype)
