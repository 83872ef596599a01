"""`residual_fake_quant`: the user's function."""

import functools

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import check_input
from pallas_kernels.formats import BlockFormat
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import require_multiplier, resolve_multiplier
from pallas_kernels.residual_fake_quant import reference


def residual_fake_quant(
    x: Float[Array, "*rows d"],
    channels: Int[Array, " c"],
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows c"]]:
    """x rounded to the values of the format, and what that left over in some channels, rounded once more.

    Bit for bit `fake_quant(x)` and `fake_quant` of the chosen channels of `rule.residual` under a fourth of the multiplier. The gradient is
    straight through both roundings: the cotangent of the first result goes to x unchanged, that of the second nowhere, since x leaves
    its residual as it enters it.

    Args:
      x: bfloat16, float16 or float32, any leading axes; the kernel takes bfloat16.
      channels: int32, ascending and within 0..d-1: not checked. Blocks of the second result run along them.
      fmt: NVFP4 or MXFP4.
      multiplier: the float32 decode multiplier; None for MXFP4 only.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      Q(x) and Q(R), both in the dtype of x. A block of x with a value that is not finite becomes NaN, and so does each block of Q(R) that
      takes a channel of it.

    Raises:
      ValueError: an NVFP4 multiplier is missing or does not fit, or there are no channels.
    """
    check_input(x)
    if channels.size == 0:
        raise ValueError("residual_fake_quant got no channels; call fake_quant where nothing is compensated")
    require_multiplier(fmt, multiplier)
    return _fused(x, channels, resolve_multiplier(x, fmt, multiplier), fmt, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _fused(x, channels, multiplier, fmt, implementation):
    arguments = (x, channels, multiplier, fmt)

    def pallas():
        from pallas_kernels.residual_fake_quant import pallas as kernel

        return kernel.residual_fake_quant(*arguments)

    return dispatch("residual_fake_quant", implementation, reference=lambda: reference.residual_fake_quant(*arguments), pallas=pallas)


def _forward(x, channels, multiplier, fmt, implementation):
    return _fused(x, channels, multiplier, fmt, implementation), None


def _backward(fmt, implementation, residuals, cotangents):
    return cotangents[0], None, None


_fused.defvjp(_forward, _backward)
