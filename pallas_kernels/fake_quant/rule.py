"""Rounding to the nearest code, elementwise, shared by the jnp reference and the Pallas body."""

from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import bits_float, decode_terms, encode_block, float_bits, signed_value
from pallas_kernels.formats import BlockFormat
from pallas_kernels.ladder import nearest_value


def nearest_values(
    x: Float[Array, "*rows block"],
    magnitudes: Int[Array, "*rows block"],
    amax_bits: Int[Array, "*rows 1"],
    multiplier: Float[Array, "*m"] | None,
    fmt: BlockFormat,
) -> Float[Array, "*rows block"]:
    """Float32 values of x rounded to the format; `magnitudes` are its `magnitude_bits`, `amax_bits` their block maxima."""
    scales, gain, step = encode_block(amax_bits, multiplier)
    value = nearest_value(bits_float(magnitudes) * gain, step, fmt)
    factor, pre = decode_terms(scales, multiplier)
    return signed_value(value, float_bits(x), factor, pre)
