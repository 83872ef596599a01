"""The three grouped products in jnp, accumulated in float32."""

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

FORWARD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
GRAD_X = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
GRAD_WEIGHTS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


@jax.jit
def forward(x: Float[Array, "N K"], weights: Float[Array, "E F K"], group_sizes: Int[Array, " E"]) -> Float[Array, "N F"]:
    """x times the transposed weights of each row's group; zero rows beyond the groups."""
    return _product(x, weights, group_sizes, FORWARD)


@jax.jit
def grad_x(cotangent: Float[Array, "N F"], weights: Float[Array, "E F K"], group_sizes: Int[Array, " E"]) -> Float[Array, "N K"]:
    """The cotangent of x."""
    return _product(cotangent, weights, group_sizes, GRAD_X)


@jax.jit
def grad_weights(cotangent: Float[Array, "N F"], x: Float[Array, "N K"], group_sizes: Int[Array, " E"]) -> Float[Array, "E F K"]:
    """The cotangent of the weights; zeros for empty groups."""
    return _product(cotangent, x, group_sizes, GRAD_WEIGHTS)


def _product(left, right, group_sizes, dimensions):
    out = jax.lax.ragged_dot_general(left, right, group_sizes, dimensions, preferred_element_type=jnp.float32)
    return out.astype(left.dtype)
