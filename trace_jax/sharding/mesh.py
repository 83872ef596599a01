"""From the section `mesh` of a config to a `jax.sharding.Mesh`, and what a mesh cannot divide."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trace_jax.errors import UserError
from trace_jax.sharding.axes import AXES, BATCH

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def device_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of a config, or None for a run on one device.

    Args:
      sizes: devices along each axis; at most one is -1, which takes what the others leave.
      devices: the devices to use; None takes all of them, on all hosts.

    Raises:
      UserError: the sizes are not those of the devices that are there.
    """
    devices = jax.devices() if devices is None else devices
    wanted = [sizes.get(axis, 1) for axis in AXES]
    fixed = math.prod(size for size in wanted if size != -1)
    if -1 in wanted:
        if len(devices) % fixed:
            raise UserError(
                f"mesh: the axes {_shown(sizes)} leave no whole number of the {len(devices)} devices for mesh.{AXES[wanted.index(-1)]}; "
                f"write sizes whose product divides {len(devices)}"
            )
        wanted[wanted.index(-1)] = len(devices) // fixed
    count = math.prod(wanted)
    if count == 1 and jax.process_count() == 1:
        return None
    if count != len(devices):
        raise UserError(
            f"mesh: the axes {_shown(sizes)} take {count} devices, but {len(devices)} are there; write mesh.data=-1 for all of them, "
            "or show jax the ones to use (CUDA_VISIBLE_DEVICES)"
        )
    return Mesh(np.asarray(devices).reshape(wanted), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree lie on; None where they lie on one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) and AXES[0] in s.mesh.shape), None)


def on_mesh_of(tree: Any) -> AbstractContextManager[Any]:
    """A context in which traced code may name the axes of the mesh that the arrays of a tree lie on."""
    mesh = mesh_of(tree)
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def on_its_mesh(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function on the mesh that the arrays of its first argument lie on (`on_mesh_of`). A decorator."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with on_mesh_of(args[0]):
            return function(*args, **kwargs)

    return run


def batch_shards(mesh: Mesh | None) -> int:
    """Among how many devices the rows of a batch are divided; their number must be a multiple of it."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={sizes.get(axis, 1)}" for axis in AXES)
