"""Residual activation compensation (QUADS, arXiv 2607.15810), shared by the jnp reference and the Pallas body.

    Y = Q(X) Q(W)^T + Q(R[:, C]) Q(W)[:, C]^T,   R = X - Q(X)

1. The channels C, ascending, and the multiplier of R are fixed before the run, as every activation scale is: a choice made for each batch
   would make a token's output depend on its neighbours.
2. The blocks of Q(R[:, C]) run along C. Whole blocks of the contraction axis are a choice like any other.
3. R is exact for bfloat16 under a power of two, nudged or not. Under another multiplier it is rounded to the dtype of X.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import SMALLEST_NORMAL
from pallas_kernels.rounding import as_stored, keep_rounding


def residual(x: Float[Array, "*s"], rounded: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x - Q(x), in the dtype of x."""
    return keep_rounding((as_stored(x) - as_stored(rounded)).astype(x.dtype))


def residual_multiplier(multiplier: Float[Array, "*m"]) -> Float[Array, "*m"]:
    """A decode multiplier for residuals that needs no calibration: a fourth of the tensor's.

    A rounding error is at most one block scale, and the largest one, 448 of the tensor's multiplier, is well inside 2688 / 4.
    """
    return jnp.maximum(multiplier * 0.25, SMALLEST_NORMAL)
