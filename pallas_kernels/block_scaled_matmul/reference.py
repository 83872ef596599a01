"""The product in jnp: what the kernel computes, up to the order of the sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_scaled_matmul.epilogue import row_factors
from pallas_kernels.containers import Quantized
from pallas_kernels.dequantize.reference import dequantize
from pallas_kernels.grouped_matmul.reference import forward


@jax.jit
def grouped_block_scaled_matmul(x: Quantized, weights: Quantized, group_sizes: Int[Array, " E"]) -> Float[Array, "N F"]:
    """RN_bf16(float32 sum of code * scale * code * scale, times `row_factors`); zero rows beyond the groups.

    Values without their multiplier have at most six significant bits: they are exact, and so is every product of two, also where a
    GPU multiplies float32 in TF32. What rounds is the sum, its product with the factor, and the result.

    Args:
      x: rows [N, K].
      weights: [E, F, K], of the same format.
      group_sizes: int32 rows of each expert.

    Returns:
      [N, F] bfloat16.
    """
    total = forward(_values(x), _values(weights), group_sizes)
    return (total * row_factors(x, weights, group_sizes)).astype(jnp.bfloat16)


def _values(q: Quantized) -> Float[Array, "*rows K"]:
    """code * scale in float32."""
    one = jnp.ones((), jnp.float32) if q.fmt.has_multiplier else None
    return dequantize(q.codes, q.scales, one, q.size, q.fmt, jnp.dtype(jnp.float32))
