"""`rms_norm_fake_quant`: the user's function."""

import functools

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.blocks import check_input
from pallas_kernels.containers import Guide
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant.api import check_guide, record_arrays
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import require_multiplier, resolve_multiplier
from pallas_kernels.rms_norm_fake_quant import reference
from pallas_kernels.rms_norm_fake_quant.rule import inverse_rms, rms_norm
from pallas_kernels.straight_through import straight_through


def rms_norm_fake_quant(
    x: Float[Array, "*rows d"],
    weight: Float[Array, " d"],
    eps: float,
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None,
    guide: Guide | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows d"]:
    """x normalised by its root mean square, scaled, rounded to its dtype, and then to the values of the format.

    Bit for bit `fake_quant` or `guided_fake_quant` of `rule.rms_norm`, whose value is never written to memory by the kernel. The sums over
    rows are XLA's in every implementation. The gradient is that of the norm, straight through the rounding.

    Args:
      x: bfloat16, float16 or float32, any leading axes; the kernel takes bfloat16.
      weight: of the norm, any float dtype.
      eps: added to the mean of squares.
      fmt: NVFP4 or MXFP4.
      multiplier: the float32 decode multiplier; None for MXFP4 only.
      guide: the rollout's record; None rounds to the nearest code.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      ValueError: an NVFP4 multiplier is missing, or weight, multiplier or record do not fit x.
    """
    check_input(x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the norm's weight has shape {weight.shape}; x needs {x.shape[-1:]}")
    require_multiplier(fmt, multiplier)
    own = resolve_multiplier(x, fmt, multiplier)
    if guide is not None:
        check_guide(x, guide, fmt)
    rounding = (own,) if guide is None else record_arrays(guide, x.shape[:-1], own)
    rounded = functools.partial(_rounded, eps=eps, kind=None if guide is None else guide.kind, fmt=fmt, implementation=implementation)
    return straight_through(rounded, functools.partial(_exact, eps=eps), (x, weight), rounding)


def _exact(x, weight, *, eps):
    return rms_norm(x, weight, inverse_rms(x, eps))


def _rounded(x, weight, *rounding, eps, kind, fmt, implementation):
    # A reduction that is not fused with what follows, so that it takes the same order whatever that is.
    inverse = jax.lax.optimization_barrier(inverse_rms(x, eps))
    arguments = (x, weight, inverse, rounding, kind, fmt)

    def pallas():
        from pallas_kernels.rms_norm_fake_quant import pallas as kernel

        return kernel.rms_norm_fake_quant(*arguments)

    return dispatch("rms_norm_fake_quant", implementation, reference=lambda: reference.rms_norm_fake_quant(*arguments), pallas=pallas)
