"""The FP4 weight product as a Pallas kernel.

1. A program computes out^T for a tile of output features and a tile of rows of one expert: the weights are the first operand
   because the tensor core takes that one from registers, where they are decoded; few rows then waste little of it.
2. It walks K in chunks of 256 (`layout`): words, scales, and for each of the 16 places one product with a slice of x.
3. The sum is scaled in float32 and rounded to bfloat16 once. Where there are too few tiles to fill the device, several programs
   share the chunks of a tile and leave float32 sums, which are added in a fixed order.

Rows that a tile loads beyond its group belong to columns of the result that are not stored.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import tilings
from pallas_kernels.device import interpreted
from pallas_kernels.formats import BlockFormat
from pallas_kernels.grouped_matmul.tiles import row_tiles
from pallas_kernels.grouped_matmul_w4.decode import GPU_FACTOR, scale_operand, weight_operand
from pallas_kernels.grouped_matmul_w4.layout import PLACES, ROWS, W4Weights, split_columns

_LARGEST_OFFSET = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of one program.

    Args:
      features: output features, 64, 128 or 256.
      rows: rows of x, a power of two from 16 on.
      num_warps: 4, one warp group; more would split the small slices of x too finely to be copied ahead.
      num_stages: chunks under way.
      splits: programs that share the chunks of a tile, a divisor of their number.
    """

    features: int = 128
    rows: int = 16
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1


def choose_tiling(rows: int, weights: W4Weights, interpret: bool, sizes: tilings.Sizes | None = None) -> Tiling:
    """The tiling for a number of rows: as few row tiles as the mean group needs, so that weights are decoded once.

    Sizes are those of the device by default: features, stages, and how many programs fill it (on an H200 four on each
    multiprocessor).
    """
    experts, chunks, _, padded, _ = weights.words.shape
    mean = -(-rows // experts)
    tile = min(max(1 << (mean - 1).bit_length(), 16), 64)
    # With 16 rows (H200, 512 rows over 128 experts) 64 features and two stages took 136 us, 128 and three 149 us.
    sizes = sizes or tilings.lookup(f"grouped_matmul_w4/{'few' if tile == 16 else 'many'}_rows")
    # Interpreted, the time goes into compiling the body, which grows with the features.
    features = ROWS if interpret or padded % sizes["features"] else sizes["features"]
    # Rows that are spread evenly make a tile for every expert that has any.
    programs = padded // features * max(-(-rows // tile), min(rows, experts))
    splits = max(split for split in range(1, chunks + 1) if chunks % split == 0 and (split == 1 or programs * split <= sizes["programs"]))
    return Tiling(features=features, rows=tile, num_stages=sizes["num_stages"], splits=splits)


def _body(*refs, tiling: Tiling, fmt: BlockFormat, interpret: bool):
    group_ref, start_ref, stop_ref, x_ref, words_ref, scales_ref, multiplier_ref, out_ref = refs
    tile, split = pl.program_id(1), pl.program_id(2)
    experts, chunks = words_ref.shape[0], words_ref.shape[1] // tiling.splits
    group, start, stop = group_ref[tile], start_ref[tile], stop_ref[tile]
    rows = pl.ds(start, tiling.rows)
    # Several accumulators of 64 features share every slice of x.
    parts = [pl.ds(pl.program_id(0) * tiling.features + offset, ROWS) for offset in range(0, tiling.features, ROWS)]
    stored = (start + jnp.arange(tiling.rows, dtype=jnp.int32) < stop)[:, None]

    def chunk_sum(chunk, sums):
        words = [[words_ref[group, chunk, half, part, :] for half in range(2)] for part in parts]
        scales = [scale_operand(scales_ref[group, chunk, part, :], fmt, interpret) for part in parts]
        for place in range(PLACES):
            half, rest = divmod(place, 8)
            x = x_ref[chunk, place, rows, :]
            sums = [
                total + _product(weight_operand(word[half], scale, rest, fmt, interpret), x)
                for total, word, scale in zip(sums, words, scales, strict=True)
            ]
        return sums

    @pl.when((start < stop) & (group < experts))
    def _():
        zeros = [jnp.zeros((ROWS, tiling.rows), jnp.float32) for _ in parts]
        sums = jax.lax.fori_loop(split * chunks, (split + 1) * chunks, chunk_sum, zeros)
        for part, total in zip(parts, sums, strict=True):
            scaled = total * (1.0 if interpret else GPU_FACTOR[fmt.scale]) * multiplier_ref[group, part][:, None]
            pltriton.store(out_ref.at[split, rows, part], scaled.T.astype(out_ref.dtype), mask=stored)

    @pl.when((start < stop) & (group == experts))
    def _():
        for part in parts:
            pltriton.store(out_ref.at[split, rows, part], jnp.zeros((tiling.rows, ROWS), out_ref.dtype), mask=stored)


def _product(weights: Float[Array, "n c"], x: Float[Array, "m c"]) -> Float[Array, "n m"]:
    return jax.lax.dot_general(weights, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def grouped_matmul_w4a16(
    x: Float[Array, "M K"],
    weights: W4Weights,
    group_sizes: Int[Array, " E"],
    tiling: Tiling | None = None,
    interpret: bool | None = None,
) -> Float[Array, "M N"]:
    """As the reference, from prepared weights. Raises NotImplementedError if the kernel cannot serve the arguments."""
    interpret = interpreted(interpret)
    count = x.shape[0]
    experts, padded = weights.multiplier.shape
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the W4 kernel takes bfloat16 rows, got {x.dtype}")
    if count == 0:
        raise NotImplementedError("the W4 kernel needs at least one row")
    tiling = choose_tiling(count, weights, interpret) if tiling is None else tiling
    if padded % tiling.features or weights.words.shape[1] % tiling.splits:
        raise NotImplementedError(f"{tiling} does not divide {padded} padded features and {weights.words.shape[1]} chunks")
    slices = split_columns(jnp.pad(x, ((0, tiling.rows), (0, 0))), weights.words.shape[1])
    if max(weights.words.size, slices.size, tiling.splits * count * padded) > _LARGEST_OFFSET:
        raise NotImplementedError(f"the W4 kernel addresses at most {_LARGEST_OFFSET} elements; split the rows or the experts")
    tiles = row_tiles(group_sizes, count, tiling.rows)
    out = pl.pallas_call(
        functools.partial(_body, tiling=tiling, fmt=weights.fmt, interpret=interpret),
        grid=(padded // tiling.features, tiles.start.shape[0], tiling.splits),
        # Loads and stores reach one tile beyond the last row in interpret mode, where slices would move back to fit.
        out_shape=jax.ShapeDtypeStruct(
            (tiling.splits, count + (tiling.rows if interpret else 0), padded), x.dtype if tiling.splits == 1 else jnp.float32
        ),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
    )(*tiles, slices, weights.words, weights.scales, weights.multiplier)
    whole = out[0] if tiling.splits == 1 else jnp.sum(out, axis=0).astype(x.dtype)
    return whole[:count, : weights.rows]
