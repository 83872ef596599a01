"""Codes in bytes, two each, the first one in the low nibble."""

import triton
import triton.language as tl


@triton.jit
def pack_signed(fields, signs, BLOCK: tl.constexpr):
    """[n, BLOCK] codes as bytes [n, BLOCK // 2]: index 0..7 in the bits 28 to 30 of `fields`, sign in the highest bit of `signs`.

    Index 0 takes no sign. Other bits of both are ignored.
    """
    top = ((fields & 0x7FFFFFFF) | (signs & -0x80000000)).to(tl.uint32, bitcast=True)
    n: tl.constexpr = fields.shape[0]
    top = _joined_pairs(top.reshape(n, BLOCK // 8, 4, 2), 4)
    top = _joined_pairs(top.reshape(n, BLOCK // 8, 2, 2), 8)
    words = _joined_pairs(top, 16)
    # Adding 7 to an index carries into the sign's bit unless it is 0.
    words &= ((words & 0x77777777) + 0x77777777) | 0x77777777
    return (words[:, :, None] >> (8 * tl.arange(0, 4)[None, None, :]).to(tl.uint32)).to(tl.uint8).reshape(n, BLOCK // 2)


@triton.jit
def unpack(packed):
    """[n, bytes] as int32 codes [n, 2 * bytes]."""
    packed = packed.to(tl.int32)
    return tl.interleave(packed & 15, packed >> 4)


@triton.jit
def _joined_pairs(top, BITS: tl.constexpr):
    """From the highest `BITS` of two words each, [..., 2], the highest 2 * BITS of one, the second word's above."""
    low, high = top.split()
    return (high & ((0xFFFFFFFF << (32 - BITS)) & 0xFFFFFFFF)) | (low >> BITS)
