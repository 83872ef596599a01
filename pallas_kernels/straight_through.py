"""The gradient of a function whose result is rounded as if it were not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def straight_through(
    rounded: Callable[..., Float[Array, "*shape"]],
    exact: Callable[..., Float[Array, "*shape"]],
    inputs: tuple[Float[Array, "*_"], ...],
    constants: tuple[Any, ...],
) -> Float[Array, "*shape"]:
    """`rounded(*inputs, *constants)` with the gradient of `exact(*inputs)`.

    Source: straight-through estimator, Bengio et al., arXiv 1308.3432.

    Args:
      rounded, exact: the same function with and without its last rounding; they close over no traced array.
      inputs: what is differentiated; kept for the backward pass.
      constants: arrays or trees of them, of the rounding alone: multipliers, records. They have no gradient and are not kept.
    """
    return rounded(*inputs, *constants)


def _forward(rounded, exact, inputs, constants):
    return rounded(*inputs, *constants), inputs


def _backward(rounded, exact, inputs, cotangent):
    return jax.vjp(exact, *inputs)[1](cotangent), None


straight_through.defvjp(_forward, _backward)
