"""`grouped_block_scaled_matmul`: the user's function."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_scaled_matmul import reference
from pallas_kernels.block_scaled_matmul.device import require_sm100
from pallas_kernels.containers import Quantized
from pallas_kernels.implementation import dispatch


def grouped_block_scaled_matmul(
    x: Quantized, weights: Quantized, group_sizes: Int[Array, " E"], *, implementation: str = "reference"
) -> Float[Array, "N F"]:
    """Each quantized row times the transposed quantized weights of its expert: W4A4, codes times codes.

    The sum over code * scale * code * scale is float32; the multipliers of both sides are one float32 factor, applied to the sum before
    the only rounding. This is the arithmetic of a native FP4 engine, its "alpha epilogue", and not that of the reference product, whose
    operands are rounded to bfloat16 with their multiplier: the nudge of the multipliers (2^-17 each) stays in the result, and sums
    differ in their last bits (docs/blackwell.md). Not differentiable.

    Args:
      x: `quantize`d rows [N, K], sorted by expert.
      weights: `quantize`d weights [E, F, K] of the same format.
      group_sizes: int32 rows of each expert, zeros allowed. Rows beyond their sum give zeros.
      implementation: "reference", or "pallas" (Mosaic GPU, compute capability 10.x only). The kernel has never run, so nobody gets it
        without asking.

    Returns:
      [N, F] bfloat16.

    Raises:
      ValueError: arguments that do not fit together.
      NotImplementedError: "pallas" asked for and the device or the kernel cannot serve the arguments (the reason is given).
    """
    if x.codes.ndim != 2 or weights.codes.ndim != 3:
        raise ValueError(f"rows [N, K] meet weights [E, F, K], got codes of shape {x.codes.shape} and {weights.codes.shape}")
    if x.fmt != weights.fmt:
        raise ValueError(f"rows are {x.fmt.name} and weights {weights.fmt.name}; quantize both in one format")
    if x.size != weights.size:
        raise ValueError(f"rows of {x.size} values meet weights of {weights.size}; both are the contraction axis")
    if group_sizes.shape != weights.codes.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{weights.codes.shape[0]} experts need as many int32 sizes, got {group_sizes.dtype}{group_sizes.shape}")
    for name, q in (("rows", x), ("weights", weights)):
        if q.fmt.has_multiplier != (q.multiplier is not None):
            raise ValueError(f"{name} in {q.fmt.name} need {'a' if q.fmt.has_multiplier else 'no'} multiplier, got {q.multiplier}")

    def pallas():
        require_sm100()
        from pallas_kernels.block_scaled_matmul import mosaic

        return mosaic.grouped_block_scaled_matmul(x, weights, group_sizes)

    return dispatch(
        "grouped_block_scaled_matmul",
        implementation,
        reference=lambda: reference.grouped_block_scaled_matmul(x, weights, group_sizes),
        pallas=pallas,
    )
