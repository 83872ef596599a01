"""`rope_fake_quant`: the user's function."""

import functools

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.blocks import check_input
from pallas_kernels.containers import Guide
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant.api import check_guide, record_arrays
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import require_multiplier, resolve_multiplier
from pallas_kernels.rope_fake_quant import reference
from pallas_kernels.rope_fake_quant.rule import rotate
from pallas_kernels.straight_through import straight_through


def rope_fake_quant(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*m"] | None,
    guide: Guide | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*tokens heads head_dim"]:
    """The heads of x rotated by their positions, rounded to their dtype, and then to the values of the format.

    Bit for bit `fake_quant` or `guided_fake_quant` of `rule.rotate`, whose value is never written to memory by the kernel. The gradient is
    that of the rotation, straight through the rounding.

    Args:
      x: bfloat16, float16 or float32, keys before RoPE; the kernel takes bfloat16.
      cos, sin: float32, of `rope_tables`, one row for all heads of a token.
      fmt: NVFP4 or MXFP4.
      multiplier: the float32 decode multiplier; None for MXFP4 only. Rows are the axes of x before the last.
      guide: the rollout's record; None rounds to the nearest code.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      ValueError: an NVFP4 multiplier is missing, or tables, multiplier or record do not fit x.
    """
    check_input(x)
    expected = (*x.shape[:-2], x.shape[-1] // 2)
    if x.shape[-1] % 2 or cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"tables of shape {cos.shape} and {sin.shape} do not turn heads {x.shape}; pass rope_tables(positions, head_dim, theta)"
        )
    require_multiplier(fmt, multiplier)
    own = resolve_multiplier(x, fmt, multiplier)
    if guide is not None:
        check_guide(x, guide, fmt)
    rounding = (own,) if guide is None else record_arrays(guide, x.shape[:-1], own)
    rounded = functools.partial(_rounded, kind=None if guide is None else guide.kind, fmt=fmt, implementation=implementation)
    return straight_through(rounded, rotate, (x, cos, sin), rounding)


def _rounded(x, cos, sin, *rounding, kind, fmt, implementation):
    arguments = (x, cos, sin, rounding, kind, fmt)

    def pallas():
        from pallas_kernels.rope_fake_quant import pallas as kernel

        return kernel.rope_fake_quant(*arguments)

    return dispatch("rope_fake_quant", implementation, reference=lambda: reference.rope_fake_quant(*arguments), pallas=pallas)
