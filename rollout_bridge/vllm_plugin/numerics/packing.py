"""Two codes a byte, the even index in the low nibble."""

import torch
from torch import Tensor


def pack_codes(codes: Tensor) -> Tensor:
    """Codes 0..15, integers[..., d], as uint8[..., ceil(d/2)]; a missing last code is 0."""
    codes = codes.to(torch.uint8)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor, size: int) -> Tensor:
    """The first `size` codes of uint8[..., ceil(size/2)], uint8.

    Raises:
      ValueError: the packed bytes are those of another number of codes.
    """
    if packed.shape[-1] != -(-size // 2):
        raise ValueError(f"{size} values take {-(-size // 2)} bytes, got {packed.shape[-1]}; pass the unpadded number of values")
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1)
    return nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :size]


def mantissa_bits(packed: Tensor, size: int) -> Tensor:
    """Bit 0 of each of `size` packed codes: uint8[..., ceil(size/8)], least significant bit first, zeros past `size`.

    As a little-endian word the low bits of eight codes sit at 0, 4, ..., 28; three shift-or-mask rounds move bit 4i to bit i.
    """
    if size % 2:
        packed = torch.cat([packed[..., :-1], packed[..., -1:] & 15], dim=-1)
    words = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).contiguous().view(torch.int32) & 0x11111111
    for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF)):
        words = (words | (words >> shift)) & mask
    return words.to(torch.uint8)
