"""From the stored order of codes and scales to that of the SM100 tensor core, and back.

Codes keep their order: two to a byte, low nibble first, K fastest, is what the hardware reads; the bytes only change their type.

Scales are regrouped ("128x4 swizzle" of cuBLAS and CUTLASS): 128 rows times 4 neighbouring blocks are 512 bytes in one piece. In it,
the four bytes of row m lie at 16 * (m % 32) + 4 * (m // 32), so that 16 bytes hold four rows which are 32 apart. Tensor memory has the
same shape: 32 lanes of four 32-bit columns, one column for 32 rows.

    byte of row m, block k:  ((m // 128) * (blocks // 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4

Everything is padded with zero bytes to whole tiles: zero codes under any finite scale add nothing to a sum.
Source: PTX ISA, "tcgen05.mma, scale factor layouts"; cuBLAS, "1D block scaling factors layout".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt8

from pallas_kernels.blocks import pad_last
from pallas_kernels.formats import BlockFormat

TILE_ROWS = 128
"""Rows of a scale tile, and of an operand of the kernel."""

TILE_SIZE = 256
"""Values along K in a step of the kernel: 128 bytes, the widest swizzle of shared memory. Four or two scale tiles."""

_BLOCKS = 4
_SCALE_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e8m0": jnp.float8_e8m0fnu}


class TileOperand(NamedTuple):
    """An operand of the kernel: values float4_e2m1fn[..., rows, K], scales float8[..., rows/128, K/block/4, 32, 16], whole tiles."""

    values: Shaped[Array, "*lead rows K"]
    scales: Shaped[Array, "*lead row_tiles block_tiles 32 16"]


def tile_operand(codes: UInt8[Array, "*lead rows bytes"], scales: UInt8[Array, "*lead rows blocks"], fmt: BlockFormat) -> TileOperand:
    """Codes and scale bytes as the kernel reads them, rows padded to 128 and K to 256. A copy only where padding is needed (codes)."""
    size = whole(2 * codes.shape[-1], TILE_SIZE)
    rows = whole(codes.shape[-2], TILE_ROWS)
    pairs = jax.lax.bitcast_convert_type(_padded(codes, rows, size // 2), jnp.float4_e2m1fn)
    swizzled = swizzle_scales(_padded(scales, rows, size // fmt.block))
    return TileOperand(pairs.reshape(*pairs.shape[:-2], size), jax.lax.bitcast_convert_type(swizzled, _SCALE_DTYPES[fmt.scale]))


def swizzle_scales(scales: UInt8[Array, "*lead rows blocks"]) -> UInt8[Array, "*lead row_tiles block_tiles 32 16"]:
    """The 128x4 order, rows padded to 128 and blocks to 4 with zeros."""
    *lead, rows, blocks = scales.shape
    row_tiles, block_tiles = -(-rows // TILE_ROWS), -(-blocks // _BLOCKS)
    padded = _padded(scales, row_tiles * TILE_ROWS, block_tiles * _BLOCKS)
    split = padded.reshape(*lead, row_tiles, 4, 32, block_tiles, _BLOCKS)
    return jnp.swapaxes(split, -4, -2).reshape(*lead, row_tiles, block_tiles, 32, 16)


def unswizzle_scales(
    swizzled: UInt8[Array, "*lead row_tiles block_tiles 32 16"], rows: int, blocks: int
) -> UInt8[Array, "*lead rows blocks"]:
    """The first `rows` rows and `blocks` columns in plain order: the inverse of `swizzle_scales`."""
    *lead, row_tiles, block_tiles, _, _ = swizzled.shape
    split = swizzled.reshape(*lead, row_tiles, block_tiles, 32, 4, _BLOCKS)
    plain = jnp.swapaxes(split, -4, -2).reshape(*lead, row_tiles * TILE_ROWS, block_tiles * _BLOCKS)
    return plain[..., :rows, :blocks]


def whole(length: int, tile: int) -> int:
    """length rounded up to whole tiles."""
    return -(-length // tile) * tile


def _padded(values: Shaped[Array, "*lead rows d"], rows: int, size: int) -> Shaped[Array, "*lead padded size"]:
    missing = rows - values.shape[-2]
    values = pad_last(values, size)
    return jnp.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, missing), (0, 0)]) if missing else values
