"""The axes of a mesh, and what code that is being traced says about them.

Model code calls these functions whether or not there is a mesh: without one (`jax.set_mesh` is not in force), and inside one device's
share of a `shard_map`, they do nothing, so that a run on one device compiles the program it always did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

AXES = ("data", "fsdp", "expert", "tensor")
"""Names of the axes, in the order of the devices."""

BATCH = ("data", "fsdp", "expert")
"""Axes over which the rows of a batch are divided: outside the experts, the devices of the expert axis work on different tokens."""

AxisName: TypeAlias = str | tuple[str, ...] | None


def in_mesh() -> bool:
    """Whether what is being traced runs on a mesh as a whole."""
    mesh = jax.sharding.get_abstract_mesh()
    return AXES[0] in mesh.axis_names and not mesh.manual_axes


def on_one_shard() -> bool:
    """Whether what is being traced is one device's share of a computation on a mesh."""
    return AXES[0] in jax.sharding.get_abstract_mesh().manual_axes


def constrain(x: Any, *axes: AxisName) -> Any:
    """An array or number, divided over the mesh as said: an entry for each of its leading axes, the other axes whole."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes)) if in_mesh() else x


def per_shard(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function`, run by each device on its own share; for kernels, which the compiler could only run on whole arrays.

    Args:
      function: of arrays (or pytrees) whose shares it can compute apart.
      in_specs, out_specs: a `PartitionSpec` for each argument and result, or a tree of them.
    """
    # Kernels do not say over which axes their results vary, so that the check of it must be off; tests compare the gradients instead.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False) if in_mesh() else function


def largest_over_tensor(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The largest of the values that the devices of the tensor axis hold, inside one device's share; `x` itself elsewhere."""
    return jax.lax.pmax(x, "tensor") if on_one_shard() else x
