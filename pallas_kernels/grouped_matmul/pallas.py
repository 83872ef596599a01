"""The three grouped products as Pallas kernels.

* forward and grad_x: a program computes a tile of rows of one group (`tiles`) times a tile of output columns. The weights
  [E, F, K] are read as they lie, along K for the forward product and along F for the gradient; nothing is transposed in memory.
* grad_weights: a program computes a tile of one group's [F, K] and walks the rows of the group; only its last step is masked.

The tiles must divide the axes of the weights. A row tile that would reach beyond the last row moves back; rows of other
groups are then computed and not stored. Sums are float32 and rounded once.
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
from pallas_kernels.grouped_matmul.tiles import group_bounds, row_tiles

_LARGEST_OFFSET = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of one program, powers of two: rows and columns of its result, the step of its loop, warps, loop steps under way.

    Rows and columns of `grad_weights` are F and K; rows of the others are rows of x.
    """

    rows: int
    columns: int
    step: int
    num_warps: int = 8
    num_stages: int = 4


def choose(product: str) -> Tiling:
    """The tiling of `forward`, `grad_x` or `grad_weights` on this device."""
    return Tiling(**tilings.lookup(f"grouped_matmul/{product}"))


def _rows_body(group_ref, start_ref, stop_ref, left_ref, weights_ref, out_ref, *, tiling: Tiling, transposed: bool):
    tile = pl.program_id(1)
    group, start, stop = group_ref[tile], start_ref[tile], stop_ref[tile]
    first = jnp.minimum(start, left_ref.shape[0] - tiling.rows)
    rows = pl.ds(first, tiling.rows)
    columns = pl.ds(pl.program_id(0) * tiling.columns, tiling.columns)
    row = first + jnp.arange(tiling.rows, dtype=jnp.int32)
    stored = ((row >= start) & (row < stop))[:, None]

    def step(index, total):
        inner = pl.ds(index * tiling.step, tiling.step)
        right = weights_ref[group, inner, columns] if transposed else weights_ref[group, columns, inner]
        return total + _dot(left_ref[rows, inner], right, 1, 0 if transposed else 1)

    @pl.when((start < stop) & (group < weights_ref.shape[0]))
    def _():
        zeros = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
        total = jax.lax.fori_loop(0, left_ref.shape[1] // tiling.step, step, zeros)
        pltriton.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), mask=stored)

    @pl.when((start < stop) & (group == weights_ref.shape[0]))
    def _():
        pltriton.store(out_ref.at[rows, columns], jnp.zeros((tiling.rows, tiling.columns), out_ref.dtype), mask=stored)


def _weights_body(start_ref, stop_ref, cotangent_ref, x_ref, out_ref, *, tiling: Tiling):
    group = pl.program_id(2)
    start, stop = start_ref[group], stop_ref[group]
    rows, columns = pl.ds(pl.program_id(1) * tiling.rows, tiling.rows), pl.ds(pl.program_id(0) * tiling.columns, tiling.columns)

    def step(index, total):
        inner = pl.ds(start + index * tiling.step, tiling.step)
        return total + _dot(cotangent_ref[inner, rows], x_ref[inner, columns], 0, 0)

    whole = (stop - start) // tiling.step
    total = jax.lax.fori_loop(0, whole, step, jnp.zeros((tiling.rows, tiling.columns), jnp.float32))
    begin = start + whole * tiling.step
    first = jnp.minimum(begin, x_ref.shape[0] - tiling.step)
    row = first + jnp.arange(tiling.step, dtype=jnp.int32)
    # Both sides are masked: a row of another group may hold a NaN, which zero does not remove.
    mask = ((row >= begin) & (row < stop))[:, None]
    rest = pl.ds(first, tiling.step)
    left = jnp.where(mask, cotangent_ref[rest, rows], jnp.zeros((), cotangent_ref.dtype))
    right = jnp.where(mask, x_ref[rest, columns], jnp.zeros((), x_ref.dtype))
    out_ref[group, rows, columns] = (total + _dot(left, right, 0, 0)).astype(out_ref.dtype)


def _dot(left: Float[Array, "a b"], right: Float[Array, "c d"], left_axis: int, right_axis: int) -> Float[Array, "e f"]:
    return jax.lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def forward(
    x: Float[Array, "N K"],
    weights: Float[Array, "E F K"],
    group_sizes: Int[Array, " E"],
    tiling: Tiling | None = None,
    interpret: bool | None = None,
) -> Float[Array, "N F"]:
    """As the reference. Raises NotImplementedError if the kernel cannot serve the arguments."""
    return _rows(x, weights, group_sizes, tiling or choose("forward"), interpret, False)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def grad_x(
    cotangent: Float[Array, "N F"],
    weights: Float[Array, "E F K"],
    group_sizes: Int[Array, " E"],
    tiling: Tiling | None = None,
    interpret: bool | None = None,
) -> Float[Array, "N K"]:
    """As the reference; raises as `forward`."""
    return _rows(cotangent, weights, group_sizes, tiling or choose("grad_x"), interpret, True)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def grad_weights(
    cotangent: Float[Array, "N F"],
    x: Float[Array, "N K"],
    group_sizes: Int[Array, " E"],
    tiling: Tiling | None = None,
    interpret: bool | None = None,
) -> Float[Array, "E F K"]:
    """As the reference; raises as `forward`."""
    interpret, tiling = interpreted(interpret), tiling or choose("grad_weights")
    experts, features, size = group_sizes.shape[0], cotangent.shape[1], x.shape[1]
    _check((cotangent, x), {"F": (features, tiling.rows), "K": (size, tiling.columns)}, experts * features * size)
    missing = max(tiling.step - x.shape[0], 0)
    cotangent, x = (jnp.pad(side, ((0, missing), (0, 0))) for side in (cotangent, x))
    return pl.pallas_call(
        functools.partial(_weights_body, tiling=tiling),
        grid=(size // tiling.columns, features // tiling.rows, experts),
        out_shape=jax.ShapeDtypeStruct((experts, features, size), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
    )(*group_bounds(group_sizes, x.shape[0]), cotangent, x)


def _rows(left, weights, group_sizes, tiling, interpret, transposed):
    interpret = interpreted(interpret)
    count, size = left.shape
    columns = weights.shape[2 if transposed else 1]
    _check((left, weights), {"the contraction axis": (size, tiling.step), "the output axis": (columns, tiling.columns)}, count * columns)
    tiles = row_tiles(group_sizes, count, tiling.rows)
    left = jnp.pad(left, ((0, max(tiling.rows - count, 0)), (0, 0)))
    out = pl.pallas_call(
        functools.partial(_rows_body, tiling=tiling, transposed=transposed),
        grid=(columns // tiling.columns, tiles.start.shape[0]),
        out_shape=jax.ShapeDtypeStruct((left.shape[0], columns), left.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
    )(*tiles, left, weights)
    return out[:count]


def _check(operands, axes, out_size) -> None:
    for operand in operands:
        if operand.dtype != jnp.bfloat16:
            raise NotImplementedError(f"the grouped kernels take bfloat16, got {operand.dtype}")
    for name, (length, tile) in axes.items():
        if length % tile:
            raise NotImplementedError(f"tiles of {tile} do not divide {name} of {length}")
    if operands[0].shape[0] == 0:
        raise NotImplementedError("the grouped kernels need at least one row")
    if max(out_size, *(operand.size for operand in operands)) > _LARGEST_OFFSET:
        raise NotImplementedError(f"the grouped kernels address at most {_LARGEST_OFFSET} elements; split the rows or the groups")
