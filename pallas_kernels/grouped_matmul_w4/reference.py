"""The product with dequantized weights: what the kernel computes, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.containers import Quantized
from pallas_kernels.dequantize.reference import dequantize
from pallas_kernels.grouped_matmul.reference import forward
from pallas_kernels.multiplier import align_multiplier


@jax.jit
def grouped_matmul_w4a16(x: Float[Array, "M K"], weights: Quantized, group_sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """x times the bfloat16 values of the weights of each row's expert, accumulated in float32, in the dtype of x."""
    multiplier = None if weights.multiplier is None else align_multiplier(weights.multiplier, weights.codes.shape[:-1])
    values = dequantize(weights.codes, weights.scales, multiplier, weights.size, weights.fmt, jnp.dtype(x.dtype))
    return forward(x, values, group_sizes)
