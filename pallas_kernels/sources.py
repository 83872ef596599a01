"""Where a rounding kernel takes its values from: memory, or arithmetic on what is there, which then costs no pass of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.arithmetic import bits_float
from pallas_kernels.groups import Groups, octets


class Source(NamedTuple):
    """The values of a tensor, as a Pallas body gets them.

    Args:
      tiles: arrays of groups, of which a program gets its tile.
      whole: arrays that every program may read.
      read: loads what belongs to the program's groups, given the refs of both. Apart, since a load behind a wait halves the speed: a body
        reads everything before it computes.
      octets: from that to the octets of the groups, a list for each part of the rows, in the dtype or, holding values of the dtype, in
        float32.
      dtype: of the tensor.
    """

    tiles: tuple[Array, ...]
    whole: tuple[Array, ...]
    read: Callable[[Any, Any], Any]
    octets: Callable[[Any], list[list[Float[Array, "n 8"]]]]
    dtype: DTypeLike


def stored(x: Float[Array, "*rows d"], groups: Groups) -> Source:
    """A tensor in memory."""

    def read(tiles, whole):
        return [groups.load(tiles[0], octet) for octet in octets(groups.fmt.block)]

    return Source((groups.from_last(x, groups.fmt.block),), (), read, lambda loaded: [loaded], x.dtype)


def split_halves(x: Float[Array, "*s"]) -> tuple[UInt16[Array, "*s"], UInt16[Array, "*s"]]:
    """High and low halves of float32: a thread then loads eight of each as it does of bfloat16 values, and keeps whole octets."""
    halves = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return halves[..., 1], halves[..., 0]


def join_halves(high: UInt16[Array, "n 8"], low: UInt16[Array, "n 8"]) -> Float[Array, "n 8"]:
    """The float32 values of `split_halves`."""
    words: tuple[Int[Array, "n 8"], ...] = (high.astype(jnp.int32), low.astype(jnp.int32))
    return bits_float((words[0] << 16) | words[1])


def require_bfloat16(x: Float[Array, "..."]) -> None:
    """Raises NotImplementedError for another dtype: the arithmetic of the sources ends in a rounding to bfloat16."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the fused Pallas kernels take bfloat16, not {x.dtype}; take implementation='reference' or None")
