"""`quantize`: the user's function."""

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.blocks import check_input
from pallas_kernels.containers import Quantized
from pallas_kernels.formats import BlockFormat
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import resolve_multiplier
from pallas_kernels.quantize import reference


def quantize(
    x: Float[Array, "*rows d"],
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None = None,
    *,
    implementation: str | None = None,
) -> Quantized:
    """Packed FP4 codes and block scales of x along its last axis.

    Args:
      x: bfloat16, float16 or float32, any leading axes; computed in float32. Weights are passed through `round_to_bf16` first.
      fmt: NVFP4 or MXFP4.
      multiplier: float32 decode multiplier, finite and > 0, broadcastable against x.shape[:-1]; None takes that of the
        whole tensor (NVFP4), and is the only choice for MXFP4. Only its exponent enters the codes.
      implementation: "reference", "pallas", "triton" or None for the best one here.

    Returns:
      Quantized. A block that holds a value that is not finite gets the NaN scale byte and zero codes.

    Raises:
      ValueError: wrong dtype, empty last axis, or a multiplier that does not fit.
      NotImplementedError: the asked-for implementation cannot serve, with the reason.
    """
    check_input(x)
    multiplier = resolve_multiplier(x, fmt, multiplier)
    x = jax.lax.stop_gradient(x)

    def pallas():
        from pallas_kernels.quantize import pallas as kernel

        return kernel.quantize(x, multiplier, fmt)

    def triton():
        from pallas_kernels.quantize import triton as kernel

        return kernel.quantize(x, multiplier, fmt)

    codes, scales = dispatch(
        "quantize", implementation, reference=lambda: reference.quantize(x, multiplier, fmt), pallas=pallas, triton=triton
    )
    return Quantized(codes=codes, scales=scales, multiplier=multiplier, size=x.shape[-1], fmt=fmt)
