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
