"""Dequantization."""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels.arithmetic import decode_terms, e2m1_value, stored_value
from pallas_kernels.triton_kernels.packing import unpack
from pallas_kernels.triton_kernels.tile import load_groups, row_value, store_groups


@triton.jit
def dequantize(
    codes,
    scales,
    multiplier,
    groups,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    EACH_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The values of rows of SIZE codes."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    code = unpack(load_groups(codes, groups, (SIZE + 1) // 2, BLOCK // 2, TILE))
    scale = load_groups(scales, groups, BLOCKS, 1, TILE).to(tl.int32)
    factor, pre = decode_terms(scale, row_value(multiplier, groups, BLOCKS, EACH_ROW, TILE), SCALE)
    values = stored_value(e2m1_value(code & 7), code << 28, factor, pre, out.dtype.element_ty)
    store_groups(out, values, groups, SIZE, BLOCK, TILE)
