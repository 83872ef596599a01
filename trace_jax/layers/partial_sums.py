"""Sums in the order of an engine that spreads a layer over several devices.

Each device multiplies its share of the contraction axis and rounds the result to the compute dtype; the all-reduce then adds
the shares in that dtype. Such an engine's numbers differ from a single product's in the last bit here and there, which is
how a rollout engine drifts from its trainer even where both round to FP4 by the same rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import keep_rounding


def all_reduce(shares: Sequence[Float[Array, "*rows D"]]) -> Float[Array, "*rows D"]:
    """The sum of the shares, in order, rounded to their dtype after every addition."""
    return functools.reduce(lambda total, share: keep_rounding(total + share), [keep_rounding(share) for share in shares])


def matmul(x: Float[Array, "*rows K"], weight: Float[Array, "K D"], parts: int) -> Float[Array, "*rows D"]:
    """`x @ weight`, the contraction axis cut into `parts` equal shares that are multiplied apart and summed by `all_reduce`.

    Raises ValueError if the axis does not divide into the shares.
    """
    if x.shape[-1] % parts:
        raise ValueError(f"{x.shape[-1]} columns cannot be cut into {parts} equal shares")
    columns, rows = jnp.split(x, parts, axis=-1), jnp.split(weight, parts, axis=0)
    return all_reduce([left @ right for left, right in zip(columns, rows, strict=True)])
