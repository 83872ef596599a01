"""The order in which Blackwell's kernels keep block scales: 128 rows times 4 neighbouring blocks are 512 bytes in one piece.

In a piece the scale of row r and block b lies at 16 (r mod 32) + 4 (r div 32) + b, as `pallas_kernels.block_scaled_matmul.layout` has it.
"""

from torch import Tensor
from torch.nn.functional import pad


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scale bytes uint8[rows, blocks] as uint8[row tiles, block tiles, 32, 16]; zeros fill the last tiles."""
    rows, blocks = scales.shape
    wide = pad(scales, (0, -blocks % 4, 0, -rows % 128))
    return wide.reshape(wide.shape[0] // 128, 4, 32, wide.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten(-2).contiguous()


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """The scale bytes uint8[rows, blocks] of uint8 in that order, of any shape.

    Raises:
      ValueError: the bytes are those of another number of tiles.
    """
    tiles = -(-rows // 128), -(-blocks // 4)
    if swizzled.numel() != tiles[0] * tiles[1] * 512:
        raise ValueError(f"{rows} rows of {blocks} scales are {tiles[0] * tiles[1] * 512} bytes in tiles, got {swizzled.numel()}")
    wide = swizzled.reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return wide.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :blocks]
