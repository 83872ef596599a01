"""The two block-scaled instructions of SM100 for jax's interpreter of Mosaic GPU kernels, which has the others.

Written from the PTX ISA and not with the layout functions of the package: tensor memory has 128 lanes of 32-bit columns; a scale tile of
32 lanes times 16 bytes is copied to every quarter of the lanes, four columns for four blocks of K, and the product reads the scale of
row m from lane m % 32, column m // 32. Reads are followed by fences because the interpreter takes them for ordinary loads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def async_copy_scales_to_tmem(smem, tmem) -> None:
    """Scales of one row tile, [1, block_tiles, 32, 16] as stored, to [128, blocks] by row and block."""
    tiles = smem[...][0]
    lane_column_byte = tiles.reshape(tiles.shape[0], 32, 4, 4)
    plgpu.async_store_tmem(tmem, lane_column_byte.transpose(2, 1, 0, 3).reshape(128, 4 * tiles.shape[0]))
    plgpu.commit_tmem()


def tcgen05_mma(accumulator, a, b, barrier, *, a_scale, b_scale, accumulate) -> None:
    """accumulator (+)= scaled a [M, K] times scaled b [K, N], in float32."""
    product = lax.dot_general(_scaled(a[...], a_scale), _scaled(b[...].T, b_scale), (((1,), (1,)), ((), ())))
    before = plgpu.async_load_tmem(accumulator)
    plgpu.wait_load_tmem()
    plgpu.async_store_tmem(accumulator, jnp.where(accumulate, before, jnp.zeros_like(before)) + product)
    plgpu.commit_tmem()
    plgpu.commit_smem()
    plgpu.tcgen05_commit_arrive(barrier)


def _scaled(values, scale):
    scale = plgpu.async_load_tmem(scale).astype(jnp.float32)
    return values.astype(jnp.float32) * jnp.repeat(scale, values.shape[1] // scale.shape[1], axis=1)
