"""The product as a Mosaic GPU kernel for SM100 (Blackwell). Lowered and compiled in tests and by hand, never run.

1. A block computes 128 rows of one group (`row_padding`) times 128 output columns; blocks of empty tiles end at once.
2. One warp copies the operands and their scales for 256 values of K into a ring of `STAGES` buffers (TMA).
3. Another warp waits for a buffer, copies its scales on to tensor memory and issues the block-scaled product, which adds to a float32
   accumulator in tensor memory. The two run in order: one thread issues both. Scales have a place in tensor memory for each buffer, so
   that none is overwritten before the product that reads it has arrived at the barrier that frees its buffer.
4. All warps read the accumulator, multiply each row by its factor, round once, and store the rows of the group, no others: a tile of n
   rows leaves shared memory in pieces of powers of two.
5. Tiles of rows beyond the groups store zeros.

`LoweringSemantics.Lane` because jax 0.10 has no other for these instructions inside a warp; every layout is then written out here.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.block_scaled_matmul.epilogue import row_factors
from pallas_kernels.block_scaled_matmul.layout import TILE_ROWS, TILE_SIZE, TileOperand, tile_operand
from pallas_kernels.block_scaled_matmul.row_padding import padded_rows, take_rows
from pallas_kernels.containers import Quantized
from pallas_kernels.grouped_matmul.tiles import RowTiles, row_tiles

COLUMNS = 128
"""Output features of a block."""

STAGES = 4
"""Buffers of the ring. 36 KiB each; their scales and the accumulator take 256 of the 512 columns of tensor memory."""

_SWIZZLE = 128
_PIECES = (128, 64, 32, 16, 8, 4, 2, 1)


def _body(
    *refs,
    steps: int,
    experts: int,
    x_ring,
    weights_ring,
    x_scales_ring,
    weights_scales_ring,
    x_scales_tmem,
    weights_scales_tmem,
    accumulator,
    factors_smem,
    out_smem,
    filled,
    freed,
    factors_ready,
    finished,
):
    group_ref, start_ref, stop_ref, x_ref, x_scales_ref, weights_ref, weights_scales_ref, factors_ref, out_ref = refs
    tile, column = lax.axis_index("tile"), lax.axis_index("column")
    group, start, stop = group_ref[tile], start_ref[tile], stop_ref[tile]
    rows, columns = pl.ds(tile * TILE_ROWS, TILE_ROWS), pl.ds(column * COLUMNS, COLUMNS)
    block_tiles = x_scales_ring.shape[2]

    def wait_freed(step, _):
        plgpu.barrier_wait(freed.at[lax.rem(step, STAGES)])

    def load(step, _):
        buffer = lax.rem(step, STAGES)

        @pl.when(step >= STAGES)
        def _():
            wait_freed(step, None)

        inner, blocks = pl.ds(step * TILE_SIZE, TILE_SIZE), pl.ds(step * block_tiles, block_tiles)
        for source, ring in (
            (x_ref.at[rows, inner], x_ring),
            (weights_ref.at[group, columns, inner], weights_ring),
            (x_scales_ref.at[pl.ds(tile, 1), blocks], x_scales_ring),
            (weights_scales_ref.at[group, pl.ds(column, 1), blocks], weights_scales_ring),
        ):
            plgpu.copy_gmem_to_smem(source, ring.at[buffer], filled.at[buffer])

    def multiply(step, _):
        buffer = lax.rem(step, STAGES)
        plgpu.barrier_wait(filled.at[buffer])
        plgpu.async_copy_scales_to_tmem(x_scales_ring.at[buffer], x_scales_tmem.at[buffer])
        plgpu.async_copy_scales_to_tmem(weights_scales_ring.at[buffer], weights_scales_tmem.at[buffer])
        plgpu.tcgen05_mma(
            accumulator,
            x_ring.at[buffer],
            weights_ring.at[buffer].transpose((1, 0)),
            freed.at[buffer],
            a_scale=x_scales_tmem.at[buffer],
            b_scale=weights_scales_tmem.at[buffer],
            accumulate=step > 0,
        )

    def store(value):
        out_smem[...] = value
        plgpu.commit_smem()
        count = stop - start
        for piece in _PIECES:
            # The pieces are the binary digits of the count, the largest first.
            done = count & (-2 * piece)

            @pl.when(count & piece != 0)
            def _():
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(done, piece)], out_ref.at[pl.ds(start + done, piece), columns])  # noqa: B023

        plgpu.wait_smem_to_gmem(0)

    @pl.when((start < stop) & (group < experts))
    def _():
        plgpu.copy_gmem_to_smem(factors_ref.at[rows], factors_smem, factors_ready)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                lax.fori_loop(0, steps, load, None)
                lax.fori_loop(max(steps - STAGES, 0), steps, wait_freed, None)

            @pl.when(warp == 1)
            def _():
                lax.fori_loop(0, steps, multiply, None)
                plgpu.tcgen05_commit_arrive(finished)

        plgpu.barrier_wait(factors_ready)
        plgpu.barrier_wait(finished)
        factors = plgpu.layout_cast(factors_smem[...], plgpu.Layout.TCGEN05.reduce(1))
        total = plgpu.async_load_tmem(accumulator, layout=plgpu.Layout.TCGEN05)
        store((total * lax.broadcast_in_dim(factors, total.shape, (0,))).astype(out_smem.dtype))

    @pl.when((start < stop) & (group == experts))
    def _():
        store(plgpu.layout_cast(jnp.zeros(out_smem.shape, out_smem.dtype), plgpu.Layout.TCGEN05))


@jax.jit
def grouped_block_scaled_matmul(x: Quantized, weights: Quantized, group_sizes: Int[Array, " E"]) -> Float[Array, "N F"]:
    """As the reference, on compute capability 10.x (the caller checks). Raises NotImplementedError if it cannot serve the arguments."""
    count, features = x.codes.shape[0], weights.codes.shape[1]
    if count == 0:
        raise NotImplementedError("the block-scaled kernel needs at least one row")
    factors = row_factors(x, weights, group_sizes)
    if factors.shape[1] != 1:
        raise NotImplementedError("the block-scaled kernel takes one multiplier for each expert, not one for each output feature")
    tiles = row_tiles(group_sizes, count, TILE_ROWS)
    source = padded_rows(tiles, TILE_ROWS, count)
    rows = tile_operand(take_rows(x.codes, source), take_rows(x.scales, source), x.fmt)
    columns = tile_operand(weights.codes, weights.scales, weights.fmt)
    return _call(tiles, rows, columns, take_rows(factors[:, 0], source), count)[:, :features]


def _call(tiles: RowTiles, x: TileOperand, weights: TileOperand, factors: Float[Array, " padded"], count: int) -> Float[Array, "N F"]:
    experts, features, size = weights.values.shape
    steps = size // TILE_SIZE
    block_tiles = weights.scales.shape[2] // steps
    scale, blocks = weights.scales.dtype, 4 * block_tiles
    # A row of an operand in shared memory is 128 bytes, as wide as the swizzle.
    tiled = (plgpu.TilingTransform((8, TILE_SIZE)), plgpu.SwizzleTransform(_SWIZZLE))
    scales_smem = plgpu.SMEM((STAGES, 1, block_tiles, 32, 16), scale)
    kernel = plgpu.kernel(
        functools.partial(_body, steps=steps, experts=experts),
        out_type=jax.ShapeDtypeStruct((count, features), jnp.bfloat16),
        grid=(tiles.group.shape[0], features // COLUMNS),
        grid_names=("tile", "column"),
        kernel_name="grouped_block_scaled_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types={
            "x_ring": plgpu.SMEM((STAGES, TILE_ROWS, TILE_SIZE), x.values.dtype, transforms=tiled),
            "weights_ring": plgpu.SMEM((STAGES, COLUMNS, TILE_SIZE), x.values.dtype, transforms=tiled),
            "x_scales_ring": scales_smem,
            "weights_scales_ring": scales_smem,
            "x_scales_tmem": plgpu.TMEM((STAGES, TILE_ROWS, blocks), scale, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            "weights_scales_tmem": plgpu.TMEM((STAGES, COLUMNS, blocks), scale, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            "accumulator": plgpu.TMEM((TILE_ROWS, COLUMNS), jnp.float32),
            "factors_smem": plgpu.SMEM((TILE_ROWS,), jnp.float32),
            "out_smem": plgpu.SMEM((TILE_ROWS, COLUMNS), jnp.bfloat16),
            "filled": plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            "freed": plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),
            "factors_ready": plgpu.Barrier(),
            "finished": plgpu.Barrier(orders_tensor_core=True),
        },
    )
    return kernel(*tiles, *x, *weights, factors)
