"""Quantization: one pass over x, codes and scales out."""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels import ladder, reciprocal
from pallas_kernels.triton_kernels.arithmetic import block_amax_bits, encode_gain, encode_terms, float_bits, scale_code, scaled_magnitude
from pallas_kernels.triton_kernels.packing import pack_signed
from pallas_kernels.triton_kernels.tile import load_groups, row_value, store_groups


@triton.jit
def quantize(
    x,
    multiplier,
    groups,
    codes,
    scales,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    EACH_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Packed codes and scale bytes of x, rows of SIZE values."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    bits = float_bits(load_groups(x, groups, SIZE, BLOCK, TILE))
    gain = encode_gain(row_value(multiplier, groups, BLOCKS, EACH_ROW, TILE))
    code = scale_code(block_amax_bits(bits), gain, SCALE)
    gain, step = encode_terms(code, gain, SCALE)
    a, positive = scaled_magnitude(bits, gain, step)
    if x.dtype.element_ty == tl.bfloat16:
        field = reciprocal.nearest_field(a, positive, step, SCALE)
    else:
        field = ladder.nearest_field(a, positive, step, SCALE)
    store_groups(codes, pack_signed(field, bits, BLOCK), groups, (SIZE + 1) // 2, BLOCK // 2, TILE)
    store_groups(scales, code.to(tl.uint8), groups, BLOCKS, 1, TILE)
