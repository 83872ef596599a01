"""Parameters from disk straight onto the devices: the host has one device's share of one array, and one tensor of the files."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float

from trace_jax.models.key_map import TreePath
from trace_jax.models.registry import Params
from trace_jax.sharding.rules import shardings
from trace_jax.train.stored_policy import ParamSource


def placed_params(source: ParamSource, shapes: Params, mesh: Mesh | None) -> Params:
    """Reads every parameter, divided by the rules of the mesh; on the first device without one.

    A tensor is read once for every share that has a part of it, and not again for replicas of a share.

    Args:
      source: open; every process reads what its devices hold.
      shapes: the parameter tree with shapes as leaves.

    Raises:
      UserError: what is on disk is damaged.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(lambda _: device, shapes) if mesh is None else shardings(shapes, mesh)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> Array:
        return _placed(source, tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path), leaf.shape, sharding)

    return jax.tree_util.tree_map_with_path(read, shapes, placed)


def _placed(source: ParamSource, path: TreePath, shape: tuple[int, ...], sharding: Sharding) -> Float[Array, "*shape"]:
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # every device of a parameter's sharding holds a part
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in holders.items():
        share = _share(source, path, bounds)
        parts += [jax.device_put(share, device) for device in devices]
        jax.block_until_ready(parts)  # before the host's copy is let go of
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _share(source: ParamSource, path: TreePath, bounds: tuple[tuple[int, int], ...]) -> Float[np.ndarray, "*share"]:
    """The part of a parameter between bounds along each axis, read layer by layer, and experts one by one."""
    leading = 0 if path[0] != "groups" else 2 if "experts" in path else 1
    inner = tuple(slice(*part) for part in bounds[leading:])
    share = np.empty([high - low for low, high in bounds], np.float32)
    for position in itertools.product(*(range(*part) for part in bounds[:leading])):
        place = tuple(at - low for at, (low, _) in zip(position, bounds, strict=False))
        share[place] = source.read(path, position)[inner]
    return share
