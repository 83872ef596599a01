"""How a tensor is presented to the Pallas bodies: as a list of groups, one block of the format each.

A tensor [..., d] becomes [n, block], n = rows * ceil(d / block), padded to whole tiles of groups; one program handles one
tile. A thread then owns whole blocks, the block maximum needs no exchange between threads, and any shape reduces to one
case. What belongs to a row (multiplier, validity) is one value for all groups, or one for each row.

The same body runs on CPU in interpret mode and on NVIDIA GPUs through the Triton lowering, which wants powers of two in
every shape and does not mask a last partial tile: hence the padding.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int, Shaped

from pallas_kernels import ladder, reciprocal, tilings
from pallas_kernels.blocks import pad_last
from pallas_kernels.device import interpreted
from pallas_kernels.formats import BlockFormat

_BLOCKS = (8, 16, 32)  # whole octets, a power of two of them, and at most a word of recorded bits
_INTERPRET_PROGRAMS = 16  # an interpreted program costs about half a millisecond whatever it does
_LARGEST_OFFSET = 2**31 - 1
_UNCUT = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The tiling of one call.

    Args:
      rows: leading axes of the tensor.
      size: its last axis.
      fmt: the format; a group is one of its blocks.
      interpret: whether the bodies run in interpret mode.
      tile: groups of one program, a power of two.
      parts: into which a row is cut. A group is then a block of each part, in the same place, and arrays are not cut into tiles.
    """

    rows: tuple[int, ...]
    size: int
    fmt: BlockFormat
    interpret: bool
    tile: int
    parts: int = 1

    @property
    def blocks(self) -> int:
        """Groups of one row."""
        return self.fmt.scales_bytes(self.size // self.parts)

    @property
    def count(self) -> int:
        """Groups of the tensor."""
        total = self.blocks
        for axis in self.rows:
            total *= axis
        return total

    @property
    def padded(self) -> int:
        """Groups after padding to whole tiles."""
        return -(-self.count // self.tile) * self.tile

    @property
    def num_warps(self) -> int:
        """Warps of one program on a GPU. One group a thread, never less: a thread then owns whole octets (`pairs`)."""
        return max(self.tile // 32, 1)

    def from_last(self, x: Shaped[Array, "*rows d"], width: int) -> Shaped[Array, "n width"] | Shaped[Array, " n"]:
        """An array whose last axis holds `width` entries for each block (the last block may be cut short), for `load` and `of_blocks`."""
        if self.parts > 1:
            return x.reshape(-1)
        groups = self._padded(pad_last(x, self.blocks * width).reshape(self.count, width))
        return groups[:, 0] if width == 1 else groups

    def to_last(self, groups: Shaped[Array, "n ..."], length: int) -> Shaped[Array, "*rows length"]:
        """The first `length` entries of every row of an output."""
        return (groups if self.parts > 1 else groups[: self.count]).reshape((*self.rows, -1))[..., :length]

    def spec(self, array: Shaped[Array, "..."] | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        """One tile of an array of groups, or all of a [1] array, or of any where rows are cut into parts."""
        if self.parts > 1:
            return _UNCUT
        if array.ndim == 1:
            return pl.BlockSpec((1,), lambda i: (0,)) if array.shape[0] == 1 else pl.BlockSpec((self.tile,), lambda i: (i,))
        return pl.BlockSpec((self.tile, array.shape[1]), lambda i: (i, 0))

    def call(self, body, inputs, outputs, whole=()):
        """Runs `body(*input_refs, *whole_refs, *output_refs)` once for each tile; arrays in `whole` are not cut into tiles.

        Inputs and `whole` may hold tuples of arrays, of which the body gets tuples of refs.
        """
        return pl.pallas_call(
            body,
            grid=(self.padded // self.tile,),
            in_specs=[*jax.tree.map(self.spec, list(inputs)), *jax.tree.map(lambda _: _UNCUT, list(whole))],
            out_specs=[self.spec(array) for array in outputs],
            out_shape=list(outputs),
            compiler_params=pltriton.CompilerParams(num_warps=self.num_warps),
            interpret=self.interpret,
        )(*inputs, *whole)

    def row_values(self, value: Shaped[Array, "*m"]) -> Shaped[Array, " m"]:
        """A scalar as [1], or a row value (one axis for every leading axis) as one entry for each row: a whole array for `of_rows`."""
        return value.reshape(1) if value.size == 1 else jnp.broadcast_to(value, self.rows).reshape(-1)

    def of_rows(self, ref: jax.Ref) -> Shaped[Array, " n"]:
        """Inside a body: the row value of each group, or [1]; so no pass before the kernel writes one for every group."""
        if ref.shape[0] == 1:
            return ref[...]
        return ref[jax.lax.div(self._numbers(), self.blocks)]

    def of_blocks(self, ref: jax.Ref, part: int = 0) -> Shaped[Array, " n"]:
        """Inside a body: the one entry for the block that each group has in a part."""
        return ref[...] if self.parts == 1 else ref[self._blocks(part)]

    def load(self, ref: jax.Ref, columns: slice, part: int = 0) -> Shaped[Array, "n width"]:
        """Inside a body: some of the entries for the block that each group has in a part."""
        return ref[self._at(ref, columns, part)]

    def store(self, ref: jax.Ref, blocks: list[list[Shaped[Array, "n 8"]]]) -> None:
        """Inside a body: writes the octets of each group, a list for each part; all at once, since they are neighbours in memory."""
        for part, values in enumerate(blocks):
            for octet, value in zip(octets(self.fmt.block), values, strict=True):
                ref[self._at(ref, octet, part)] = value

    def of_columns(self, ref: jax.Ref, octet: slice) -> Shaped[Array, "n 8"]:
        """Inside a body: an octet of each group from a row that all rows of the tensor share, padded to whole blocks."""
        return self.octet_at(ref, self.places(octet)[1])

    def places(self, octet: slice) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
        """Inside a body: the row of the tensor and the column, of the first part, in which an octet of each group begins."""
        number = self._numbers()
        return jax.lax.div(number, self.blocks), jax.lax.rem(number, self.blocks) * self.fmt.block + octet.start

    def octet_at(self, ref: jax.Ref, start: Int[Array, " n"]) -> Shaped[Array, "n 8"]:
        """Inside a body: eight values of a whole array for each group, from multiples of eight on, so that they are one load."""
        return ref[_run(start, 8)]

    def out(self, width: int, dtype) -> jax.ShapeDtypeStruct:
        """An output with `width` entries for each block; one entry makes a vector."""
        if self.parts > 1:
            return jax.ShapeDtypeStruct((self.count * self.parts * width,), dtype)
        return jax.ShapeDtypeStruct((self.padded,) if width == 1 else (self.padded, width), dtype)

    def _numbers(self) -> Int[Array, " n"]:
        """Inside a body: the numbers of its groups; that of the last one stands for those after it."""
        group = pl.program_id(0) * self.tile + jax.lax.broadcasted_iota(jnp.int32, (self.tile,), 0)
        return jnp.minimum(group, self.count - 1)

    def _blocks(self, part: int) -> Int[Array, " n"]:
        """Inside a body: the numbers that the blocks of the groups in a part have among all blocks of the tensor."""
        number = self._numbers()
        return number + (jax.lax.div(number, self.blocks) * (self.parts - 1) + part) * self.blocks

    def _at(self, ref: jax.Ref, columns: slice, part: int) -> Any:
        """Inside a body: the index of some of the entries for the block that each group has in a part."""
        if self.parts == 1:
            return slice(None), columns
        width = ref.shape[0] // (self.count * self.parts)
        return _run(self._blocks(part) * width + columns.start, columns.stop - columns.start)

    def _padded(self, groups: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        missing = self.padded - groups.shape[0]
        return jnp.pad(groups, [(0, missing)] + [(0, 0)] * (groups.ndim - 1)) if missing else groups


def plan(shape: tuple[int, ...], fmt: BlockFormat, interpret: bool | None, tile: int | None = None, parts: int = 1) -> Groups:
    """The tiling for a tensor; interpret None takes interpret mode on CPU and compiles for a GPU, with the tile of the device if None.

    Rows that are cut into several parts must have whole blocks in each of them.

    Raises NotImplementedError if the kernels cannot serve the format, the shape or the device.
    """
    if fmt.block not in _BLOCKS:
        raise NotImplementedError(f"the Pallas kernels take blocks of {', '.join(map(str, _BLOCKS))} values, not {fmt.block} ({fmt.name})")
    interpret = interpreted(interpret)
    tile = tile or tilings.lookup("quantizers")["tile"]
    groups = Groups(shape[:-1], shape[-1], fmt, interpret, 1, parts)
    if groups.count == 0:
        raise NotImplementedError(f"the Pallas kernels need at least one row, got shape {shape}")
    if (groups.count + tile) * parts * fmt.block > _LARGEST_OFFSET:
        raise NotImplementedError(f"the Pallas kernels address at most {_LARGEST_OFFSET} values, got shape {shape}; split the rows")
    wanted = -(-groups.count // _INTERPRET_PROGRAMS) if interpret else tile
    return dataclasses.replace(groups, tile=1 << (max(wanted, 16) - 1).bit_length())


def octets(width: int) -> list[slice]:
    """The columns of a tile in eights, which a body takes one after the other.

    Eight codes make a word and eight bfloat16 values one load of a thread, so that on a GPU a thread has whole groups and
    nothing changes hands between threads.
    """
    return [slice(start, start + 8) for start in range(0, width, 8)]


def _run(start: Int[Array, " n"], width: int) -> Int[Array, "n width"]:
    """The indices of a number of neighbours for each group."""
    return start[:, None] + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)


def block_amax(magnitudes: list[Int[Array, "n 8"]]) -> Int[Array, "n 1"]:
    """The largest of the magnitude bits of each group, whose octets these are."""
    return functools.reduce(jnp.maximum, [jnp.max(octet, axis=1) for octet in magnitudes])[:, None]


def rounding_of(dtype) -> ModuleType:
    """The module whose rounding a body uses for input of a dtype."""
    return reciprocal if dtype == jnp.bfloat16 else ladder
