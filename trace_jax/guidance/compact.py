"""From full FP4 codes to one mantissa bit a value, on packed NumPy bytes."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8


def code_low_bits(codes: UInt8[np.ndarray, "*lead codes"], size: int) -> UInt8[np.ndarray, "*lead bits"]:
    """The mantissa bit (bit 0) of each packed E2M1 code, packed again, least significant bit first.

    Args:
        codes: ceil(size/2) bytes on the last axis, the even index in the low nibble.
        size: values on the last axis.

    Returns:
        ceil(size/8) bytes on the last axis; bits past `size` are 0.

    Four bytes hold eight codes and become one byte. As a little-endian word their low bits sit at 0, 4, ..., 28;
    three shift-or-mask rounds move bit 4i to bit i, which is several times faster than unpacking to one byte a value.
    """
    num_words = -(-size // 8)
    padded = np.zeros((*codes.shape[:-1], 4 * num_words), np.uint8)
    padded[..., : codes.shape[-1]] = codes
    if size % 2:
        padded[..., codes.shape[-1] - 1] &= 0x0F
    words = padded.view("<u4") & np.uint32(0x11111111)
    for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF)):
        words = (words | (words >> np.uint32(shift))) & np.uint32(mask)
    return words.astype(np.uint8)
