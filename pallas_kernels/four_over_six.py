"""NVFP4 with the better of two scales a block: the largest magnitude becomes 6, or it becomes 4 (Cook et al., arXiv 2512.02010).

Between the codes 4 and 6 there is nothing, so a block with values near five sixths of its largest is served better by a grid that ends
at 4. Decoding is that of plain NVFP4. For weights, once an update: jnp only, no kernel.

The squared errors are rounded to 16 bits and added in a fixed order, so that no compiler can fuse or reorder them and the choice is
the same everywhere. The published recipe caps scales at 256 to leave room for the second candidate; a power of two as the multiplier
has that room when it is chosen for one and a half times the largest magnitude (`room`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.arithmetic import bits_float, e2m1_magnitude, encode_block, float_bits, magnitude_bits
from pallas_kernels.blocks import join_blocks, per_block, split_blocks
from pallas_kernels.containers import Quantized
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.formats import NVFP4
from pallas_kernels.ladder import nearest_index
from pallas_kernels.packing import pack_codes
from pallas_kernels.straight_through import straight_through


def room(amax: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The magnitude that `decode_multiplier` is given, for both candidates to have a scale: 1.5 amax, exact for bfloat16."""
    return amax * 1.5


def quantize_four_over_six(
    x: Float[Array, "*rows d"], multiplier: Float[Array, "*rows"]
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows blocks"]]:
    """Packed codes and E4M3 scale bytes; a tie of the errors takes 6.

    Args:
      x: float32 that holds bfloat16 values, such as `round_to_bf16` gives.
      multiplier: decode multiplier of each row, `decode_multiplier(room(amax))`.
    """
    blocks = split_blocks(x, NVFP4)
    magnitudes, rows = magnitude_bits(blocks), per_block(multiplier)
    amax = jnp.max(magnitudes, axis=-1, keepdims=True)
    six, four = (_candidate(magnitudes, bits, rows) for bits in (amax, float_bits(room(bits_float(amax)))))
    better = four[2] < six[2]
    index = jnp.where(better, four[0], six[0])
    codes = jnp.where((index > 0) & (float_bits(blocks) < 0), index + 8, index)
    codes = jax.lax.optimization_barrier(join_blocks(codes.astype(jnp.uint8), x.shape[-1]))
    return pack_codes(codes), jnp.where(better, four[1], six[1])[..., 0].astype(jnp.uint8)


def fake_quant_four_over_six(x: Float[Array, "*rows d"], multiplier: Float[Array, "*rows"]) -> Float[Array, "*rows d"]:
    """What `quantize_four_over_six` decodes to, float32, with a straight-through gradient to x."""
    return straight_through(_decoded, lambda x: x, (x,), (multiplier,))


def _decoded(x: Array, multiplier: Array) -> Array:
    codes, scales = quantize_four_over_six(x, multiplier)
    return dequantize(Quantized(codes, scales, multiplier, size=x.shape[-1], fmt=NVFP4), x.dtype)


def _candidate(magnitudes: Array, amax: Array, rows: Array) -> tuple[Array, Array, Array]:
    """Code magnitudes, scale byte and error of the blocks under the scale that makes 6 of `amax`."""
    scale, gain, step = encode_block(amax, rows)
    index = nearest_index(bits_float(magnitudes) * gain, step, NVFP4)
    # Both products are exact, so a fused multiply-add gives the same difference.
    error = e2m1_magnitude(index) * step - bits_float(magnitudes) * gain
    squares = jax.lax.reduce_precision(error * error, exponent_bits=8, mantissa_bits=15)
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return index, scale, squares
