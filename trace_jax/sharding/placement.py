"""Arrays of the host onto the devices of a mesh, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from trace_jax.sharding.axes import BATCH, AxisName
from trace_jax.sharding.mesh import mesh_of, replicated
from trace_jax.sharding.rules import shardings


def put(x: Shaped[np.ndarray, "*s"], sharding: NamedSharding) -> Shaped[Array, "*s"]:
    """An array that every process has whole; each device takes its share."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def put_rows(mesh: Mesh | None, x: Shaped[np.ndarray, "*s"], *, axis: int | None = 0, heads: int | None = None) -> Shaped[Array, "*s"]:
    """An array of a batch.

    Args:
      mesh: None puts it on the default device.
      axis: that of the batch's rows; None where the array has none and is whole everywhere.
      heads: the axis of the key and value heads, if there is one.
    """
    if mesh is None:
        return jnp.asarray(x)
    axes: list[AxisName] = [None] * x.ndim
    if axis is not None:
        axes[axis] = BATCH
    if heads is not None:
        axes[heads] = "tensor"
    return put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def put_params(mesh: Mesh | None, params: Any) -> Any:
    """A tree of parameters, of the host or of one device, divided by the rules; on the default device without a mesh."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, params)
    return jax.tree.map(lambda leaf, sharding: put(np.asarray(leaf), sharding), params, shardings(params, mesh))


def on_one_device(tree: Any) -> Any:
    """The arrays of a tree whole on one device of this process; arrays that are not on a mesh are returned as they are."""
    mesh = mesh_of(tree)
    return tree if mesh is None else jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, _whole_on(mesh)(tree))


def to_host(tree: Any) -> Any:
    """The arrays of a tree as NumPy arrays, whole in every process; all processes call it."""
    return jax.device_get(on_one_device(tree))


@functools.cache
def _whole_on(mesh: Mesh) -> Callable[[Any], Any]:
    """Brings a tree together on every device; a compiled program, because arrays of several hosts move in no other way."""
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))
