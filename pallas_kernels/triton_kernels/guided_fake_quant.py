"""Guided rounding: the tensor and its record are each read once. The rule is that of `pallas_kernels.guided_fake_quant.rule`."""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels import ladder, reciprocal
from pallas_kernels.triton_kernels.arithmetic import (
    INFINITY_BITS,
    block_amax_bits,
    decode_terms,
    encode_gain,
    encode_terms,
    float_bits,
    scale_code,
    scaled_magnitude,
    stored_value,
)
from pallas_kernels.triton_kernels.packing import unpack
from pallas_kernels.triton_kernels.tile import load_groups, load_words, row_value, store_groups


@triton.jit
def guided_fake_quant(
    x,
    record,
    scales,
    valid,
    multiplier,
    rollout_multiplier,
    groups,
    out,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    VALID_EACH_ROW: tl.constexpr,
    EACH_ROW: tl.constexpr,
    ROLLOUT_EACH_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """x, rows of SIZE values, rounded under its record; KIND "scales" reads no record."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    EXACT: tl.constexpr = x.dtype.element_ty != tl.bfloat16
    bits = float_bits(load_groups(x, groups, SIZE, BLOCK, TILE))
    known = row_value(valid, groups, BLOCKS, VALID_EACH_ROW, TILE) != 0
    own = row_value(multiplier, groups, BLOCKS, EACH_ROW, TILE)
    rollout = row_value(rollout_multiplier, groups, BLOCKS, ROLLOUT_EACH_ROW, TILE)
    rollout_code = load_groups(scales, groups, BLOCKS, 1, TILE).to(tl.int32)

    amax_bits = block_amax_bits(bits)
    code = tl.where(known, rollout_code, scale_code(amax_bits, encode_gain(own), SCALE))
    used = tl.where(known, rollout, own)
    gain, step = encode_terms(code, encode_gain(used), SCALE)
    a, positive = scaled_magnitude(bits, gain, step)
    if KIND == "scales":
        if EXACT:
            value = ladder.nearest_value(a, positive, step, SCALE)
        else:
            value = reciprocal.nearest_value(a, positive, step, SCALE)
    elif KIND == "mantissa":
        words = load_words(record, groups, (SIZE + 7) // 8, BLOCK // 8, TILE)
        bit = (words >> tl.arange(0, BLOCK)[None, :]) & 1
        if EXACT:
            value = ladder.value_with_low_bit(a, positive, step, bit, known, SCALE)
        else:
            value = reciprocal.value_with_low_bit(a, positive, step, bit, known, SCALE)
    else:
        recorded = unpack(load_groups(record, groups, (SIZE + 1) // 2, BLOCK // 2, TILE))
        # Seen from x, a code of the other sign lies below zero.
        index = tl.where((bits ^ (recorded << 28)) < 0, 0, recorded & 7)
        if EXACT:
            value = ladder.value_towards(a, positive, step, index, known, SCALE)
        else:
            value = reciprocal.value_towards(a, positive, step, index, known, SCALE)
    factor, pre = decode_terms(code, used, SCALE)
    # The rollout's scale cannot tell that x is not finite, so the block says so itself.
    factor = tl.where(amax_bits >= INFINITY_BITS, float("nan"), factor)
    store_groups(out, stored_value(value, bits, factor, pre, out.dtype.element_ty), groups, SIZE, BLOCK, TILE)
