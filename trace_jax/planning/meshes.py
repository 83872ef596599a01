"""Which meshes divide a model, and what each device then holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import param_shapes
from trace_jax.sharding.axes import AXES
from trace_jax.sharding.rules import check_heads_and_blocks, device_values

TRAINED_BYTES = 32
"""Masters and moments, gradients, and the new masters and moments beside the old: bytes of a parameter (`footprint.training_bytes`)."""


class Fit(NamedTuple):
    """A mesh, and the bytes that its fullest device holds without activations."""

    sizes: dict[str, int]
    device_bytes: float


def fitting_meshes(policy: Policy, devices: int, memory: float, fmt: str) -> list[Fit]:
    """The meshes of that many devices which the rules divide and whose devices have room; those with the least communication first:
    a small `tensor` axis, then a small `expert` axis, then a small `fsdp` axis.

    Args:
      memory: bytes of a device that training may fill.
      fmt: of the experts.
    """
    shapes = param_shapes(policy.family, policy.config)
    found = []
    for sizes in _factorizations(devices):
        try:
            check_heads_and_blocks(sizes, policy.config, (fmt,))
            held = device_values(shapes, sizes)
        except UserError:
            continue
        if TRAINED_BYTES * held <= memory:
            found.append(Fit(sizes, TRAINED_BYTES * held))
    return sorted(found, key=lambda fit: [fit.sizes[axis] for axis in ("tensor", "expert", "fsdp")])


def _factorizations(devices: int) -> Iterator[dict[str, int]]:
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for fsdp in divisors:
        for expert in divisors:
            for tensor in divisors:
                rest, left = divmod(devices, fsdp * expert * tensor)
                if rest and not left:
                    yield dict(zip(AXES, (rest, fsdp, expert, tensor), strict=True))
