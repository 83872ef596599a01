"""Rounding to the nearest code, elementwise, shared by the jnp reference and the Pallas body."""

from types import ModuleType

from jaxtyping import Array, Float, Int

from pallas_kernels.arithmetic import bits_float, decode_terms, encode_block
from pallas_kernels.formats import BlockFormat


def nearest_terms(
    magnitudes: Int[Array, "*rows block"],
    amax_bits: Int[Array, "*rows 1"],
    multiplier: Float[Array, "*#rows 1"] | Float[Array, ""] | None,
    fmt: BlockFormat,
    rounding: ModuleType,
) -> tuple[Float[Array, "*rows block"], Float[Array, "*rows 1"], Float[Array, "*rows 1"] | None]:
    """(magnitude, factor, pre) of the rounded values, for `signed_value` or `stored_value`.

    Args:
      magnitudes: `magnitude_bits` of the values.
      amax_bits: their block maxima.
      multiplier: decode multiplier; None for E8M0.
      rounding: `ladder`, or `reciprocal` for bfloat16 values.
    """
    scales, gain, step = encode_block(amax_bits, multiplier)
    value = rounding.nearest_value(bits_float(magnitudes) * gain, step, fmt)
    return value, *decode_terms(scales, multiplier)
