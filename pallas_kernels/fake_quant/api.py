"""`fake_quant`: the user's function."""

import functools

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.blocks import check_input
from pallas_kernels.fake_quant import reference
from pallas_kernels.formats import BlockFormat
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import resolve_multiplier


def fake_quant(
    x: Float[Array, "*rows d"],
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows d"]:
    """x rounded to the values of the format: `dequantize(quantize(x), x.dtype)` bit for bit.

    The gradient is straight-through: the cotangent goes to x unchanged, in the dtype of x; scales and multiplier are
    constants. A block with a value that is not finite becomes NaN.

    Args, raises: as `quantize`.

    Returns:
      Array of the shape and dtype of x.
    """
    check_input(x)
    return _fake_quant(x, resolve_multiplier(x, fmt, multiplier), fmt, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _fake_quant(x, multiplier, fmt, implementation):
    def pallas():
        from pallas_kernels.fake_quant import pallas as kernel

        return kernel.fake_quant(x, multiplier, fmt)

    def triton():
        from pallas_kernels.fake_quant import triton as kernel

        return kernel.fake_quant(x, multiplier, fmt)

    return dispatch("fake_quant", implementation, reference=lambda: reference.fake_quant(x, multiplier, fmt), pallas=pallas, triton=triton)


def _forward(x, multiplier, fmt, implementation):
    return _fake_quant(x, multiplier, fmt, implementation), None


def _backward(fmt, implementation, residuals, cotangent):
    return cotangent, None


_fake_quant.defvjp(_forward, _backward)
