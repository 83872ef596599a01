"""Fake quantization: one read and one write of the tensor."""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels import ladder, reciprocal
from pallas_kernels.triton_kernels.arithmetic import (
    block_amax_bits,
    decode_terms,
    encode_gain,
    encode_terms,
    float_bits,
    scale_code,
    scaled_magnitude,
    stored_value,
)
from pallas_kernels.triton_kernels.tile import load_groups, row_value, store_groups


@triton.jit
def fake_quant(
    x,
    multiplier,
    groups,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    EACH_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """x, rows of SIZE values, rounded to the format."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    bits = float_bits(load_groups(x, groups, SIZE, BLOCK, TILE))
    own = row_value(multiplier, groups, BLOCKS, EACH_ROW, TILE)
    gain = encode_gain(own)
    code = scale_code(block_amax_bits(bits), gain, SCALE)
    gain, step = encode_terms(code, gain, SCALE)
    a, positive = scaled_magnitude(bits, gain, step)
    if x.dtype.element_ty == tl.bfloat16:
        value = reciprocal.nearest_value(a, positive, step, SCALE)
    else:
        value = ladder.nearest_value(a, positive, step, SCALE)
    factor, pre = decode_terms(code, own, SCALE)
    store_groups(out, stored_value(value, bits, factor, pre, out.dtype.element_ty), groups, SIZE, BLOCK, TILE)
