"""`grouped_matmul`: the user's function."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.implementation import dispatch


def grouped_matmul(
    x: Float[Array, "N K"], weights: Float[Array, "E F K"], group_sizes: Int[Array, " E"], *, implementation: str | None = None
) -> Float[Array, "N F"]:
    """Each row of x times the transposed weight matrix of its group: the experts of a layer, on rows sorted by expert.

    All three products (this one and those of its gradients) accumulate in float32 and round once, and none expands the weights.

    Args:
      x: bfloat16 or float32, rows sorted by group.
      weights: of the same dtype, contraction axis last, as `ExpertWeights` has them.
      group_sizes: int32 rows of each group, zeros allowed. Rows beyond their sum give zeros and get a zero gradient.
      implementation: "reference" (`jax.lax.ragged_dot_general`), "pallas" or None for the best one here; serves the gradients too.

    Returns:
      [N, F] in the dtype of x. Differentiable in x and weights.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
      NotImplementedError: the named implementation cannot serve the arguments (the reason is given).
    """
    if weights.ndim != 3 or x.ndim != 2 or x.shape[1] != weights.shape[2]:
        raise ValueError(f"rows [N, K] meet weights [E, F, K], got {x.shape} and {weights.shape}; K is the last axis of both")
    if x.dtype != weights.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"rows are {x.dtype} and weights {weights.dtype}; pass both as bfloat16 or both as float32")
    if group_sizes.shape != weights.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{weights.shape[0]} groups need as many int32 sizes, got {group_sizes.dtype}{group_sizes.shape}")
    return _grouped_matmul(x, weights, group_sizes, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x, weights, group_sizes, implementation):
    return _run("forward", implementation, x, weights, group_sizes)


def _forward(x, weights, group_sizes, implementation):
    return _grouped_matmul(x, weights, group_sizes, implementation), (x, weights, group_sizes)


def _backward(implementation, residuals, cotangent):
    x, weights, group_sizes = residuals
    return (
        _run("grad_x", implementation, cotangent, weights, group_sizes),
        _run("grad_weights", implementation, cotangent, x, group_sizes),
        None,
    )


_grouped_matmul.defvjp(_forward, _backward)


def _run(product: str, implementation: str | None, left: Array, right: Array, group_sizes: Array) -> Array:
    def pallas() -> Array:
        from pallas_kernels.grouped_matmul import pallas as kernels

        return getattr(kernels, product)(left, right, group_sizes)

    return dispatch(
        "grouped_matmul", implementation, reference=lambda: getattr(reference, product)(left, right, group_sizes), pallas=pallas
    )
