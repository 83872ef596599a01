"""`swiglu_fake_quant`: the user's function."""

import functools

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.blocks import check_input
from pallas_kernels.formats import BlockFormat
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import require_multiplier, resolve_multiplier
from pallas_kernels.straight_through import straight_through
from pallas_kernels.swiglu_fake_quant import reference
from pallas_kernels.swiglu_fake_quant.rule import swiglu


def swiglu_fake_quant(
    gate: BFloat16[Array, "*rows d"],
    up: BFloat16[Array, "*rows d"],
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None,
    *,
    implementation: str | None = None,
) -> BFloat16[Array, "*rows d"]:
    """silu(gate) * up, rounded to bfloat16 and then to the values of the format.

    Bit for bit `fake_quant` of `rule.swiglu`, which has a sigmoid of its own: `jax.nn.silu` is not the same number on every device. The
    gradient is that of SwiGLU, straight through the rounding.

    Args:
      gate, up: bfloat16 of one shape.
      fmt: NVFP4 or MXFP4.
      multiplier: the float32 decode multiplier; None for MXFP4 only.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      bfloat16 of the same shape.

    Raises:
      ValueError: a projection is not bfloat16, the shapes differ, an NVFP4 multiplier is missing or does not fit.
    """
    check_input(gate)
    if not (gate.dtype == up.dtype == jnp.bfloat16):
        raise ValueError(f"swiglu_fake_quant takes bfloat16, got {gate.dtype} and {up.dtype}; its sigmoid is defined for no other dtype")
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} and up {up.shape}; pass two projections of the same tokens")
    require_multiplier(fmt, multiplier)
    rounded = functools.partial(_rounded, fmt=fmt, implementation=implementation)
    return straight_through(rounded, swiglu, (gate, up), (resolve_multiplier(gate, fmt, multiplier),))


def _rounded(*arrays, fmt, implementation):
    def pallas():
        from pallas_kernels.swiglu_fake_quant import pallas as kernel

        return kernel.swiglu_fake_quant(*arrays, fmt)

    return dispatch("swiglu_fake_quant", implementation, reference=lambda: reference.swiglu_fake_quant(*arrays, fmt), pallas=pallas)
