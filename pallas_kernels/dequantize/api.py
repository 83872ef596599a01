"""`dequantize`: the user's function."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.containers import Quantized
from pallas_kernels.dequantize import reference
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import align_multiplier


def dequantize(q: Quantized, dtype: DTypeLike = jnp.bfloat16, *, implementation: str | None = None) -> Float[Array, "*rows d"]:
    """The values of a quantized tensor: RN_bf16(code value * (scale * multiplier)), in the given dtype.

    With the project's multipliers (powers of two, nudged or not) the rounding removes the nudge and the value is exact. A
    foreign multiplier (`amax / 2688`) is rounded to bfloat16 in that order. Results below 2^-126 are zero.

    Args:
      q: codes uint8[..., ceil(d/2)], scales uint8[..., ceil(d/block)], multiplier as in `quantize`.
      dtype: of the result.
      implementation: "reference", "pallas", "triton" or None for the best one here.

    Returns:
      [..., d] of `dtype`; NaN for blocks whose scale byte is not a scale.

    Raises:
      ValueError: codes, scales and size do not belong together.
    """
    rows = q.codes.shape[:-1]
    expected = (*rows, q.fmt.codes_bytes(q.size)), (*rows, q.fmt.scales_bytes(q.size))
    if (q.codes.shape, q.scales.shape) != expected:
        raise ValueError(
            f"codes {q.codes.shape} and scales {q.scales.shape} do not fit {q.size} values of {q.fmt.name}; "
            f"expected {expected[0]} and {expected[1]}"
        )
    if q.fmt.has_multiplier != (q.multiplier is not None):
        raise ValueError(f"{q.fmt.name} needs {'a' if q.fmt.has_multiplier else 'no'} multiplier, got {q.multiplier}")
    multiplier = None if q.multiplier is None else align_multiplier(q.multiplier, rows)

    arguments = (q.codes, q.scales, multiplier, q.size, q.fmt, jnp.dtype(dtype))

    def pallas():
        from pallas_kernels.dequantize import pallas as kernel

        return kernel.dequantize(*arguments)

    def triton():
        from pallas_kernels.dequantize import triton as kernel

        return kernel.dequantize(*arguments)

    return dispatch("dequantize", implementation, reference=lambda: reference.dequantize(*arguments), pallas=pallas, triton=triton)
