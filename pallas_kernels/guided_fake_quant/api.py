"""`guided_fake_quant`: the user's function."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.blocks import check_input
from pallas_kernels.containers import GUIDE_KINDS, Guide
from pallas_kernels.formats import BlockFormat
from pallas_kernels.guided_fake_quant import reference
from pallas_kernels.implementation import dispatch
from pallas_kernels.multiplier import align_multiplier, resolve_multiplier


def guided_fake_quant(
    x: Float[Array, "*rows d"],
    guide: Guide,
    fmt: BlockFormat,
    multiplier: Float[ArrayLike, "*#rows"] | None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows d"]:
    """x rounded under the rollout's scales, to the neighbouring code that the rollout's record names.

    Rows without a valid record are rounded as `fake_quant(x, fmt, multiplier)` would. The gradient is straight-through for
    all of them. The exact rule is in `pallas_kernels.guided_fake_quant.rule`.

    Args:
      x: bfloat16, float16 or float32, any leading axes.
      guide: the record, its rows aligned with x.
      fmt: NVFP4 or MXFP4.
      multiplier: the trainer's float32 decode multiplier; None for MXFP4. For NVFP4 None is allowed only if the guide has a
        multiplier of its own (rows without a record then use that of the whole tensor).
      implementation: "reference", "pallas", "triton" or None for the best one here.

    Returns:
      Array of the shape and dtype of x. A block with a value that is not finite, or whose recorded scale byte is not a
      scale, becomes NaN.

    Raises:
      ValueError: the record does not fit x or the format.
    """
    check_input(x)
    check_guide(x, guide, fmt)
    if fmt.has_multiplier and multiplier is None and guide.multiplier is None:
        raise ValueError(f"{fmt.name} guidance needs the multiplier of the rollout; pass multiplier= or a guide that has one")
    own = resolve_multiplier(x, fmt, multiplier)
    return _guided(x, *record_arrays(guide, x.shape[:-1], own), guide.kind, fmt, implementation)


def record_arrays(guide: Guide, rows: tuple[int, ...], own: Float[Array, "*#rows"] | None) -> tuple[Shaped[Array, "..."] | None, ...]:
    """(data, scales, valid, multiplier, rollout's multiplier) as the implementations take them, from a guide that fits."""
    rollout = own if guide.multiplier is None else align_multiplier(guide.multiplier, rows)
    valid = jnp.asarray(guide.valid, dtype=bool)
    if valid.ndim:
        valid = jnp.broadcast_to(valid.reshape((1,) * (len(rows) - valid.ndim) + valid.shape), rows)
    return None if guide.kind == "scales" else guide.data, guide.scales, valid, own, rollout


def check_guide(x: Float[Array, "*rows d"], guide: Guide, fmt: BlockFormat) -> None:
    """Raises ValueError for a record that does not fit x or the format."""
    rows, size = x.shape[:-1], x.shape[-1]
    if guide.kind not in GUIDE_KINDS:
        raise ValueError(f"unknown guide kind {guide.kind!r}; write one of {', '.join(GUIDE_KINDS)}")
    if guide.scales.shape != (*rows, fmt.scales_bytes(size)):
        raise ValueError(f"guide scales have shape {guide.scales.shape}; x needs {(*rows, fmt.scales_bytes(size))} for {fmt.name}")
    if guide.kind != "scales":
        expected = (*rows, -(-size // 8) if guide.kind == "mantissa" else fmt.codes_bytes(size))
        have = None if guide.data is None else guide.data.shape
        if have != expected:
            raise ValueError(f"guide data of kind {guide.kind!r} has shape {have}; x needs {expected}")
    if guide.multiplier is not None and not fmt.has_multiplier:
        raise ValueError(f"{fmt.name} has no multiplier; pass a guide with multiplier=None")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _guided(x, data, scales, valid, multiplier, rollout_multiplier, kind, fmt, implementation):
    arguments = (x, data, scales, valid, multiplier, rollout_multiplier, kind, fmt)

    def pallas():
        from pallas_kernels.guided_fake_quant import pallas as kernel

        return kernel.guided_fake_quant(*arguments)

    def triton():
        from pallas_kernels.guided_fake_quant import triton as kernel

        return kernel.guided_fake_quant(*arguments)

    return dispatch(
        "guided_fake_quant", implementation, reference=lambda: reference.guided_fake_quant(*arguments), pallas=pallas, triton=triton
    )


def _forward(*arguments):
    return _guided(*arguments), None


def _backward(kind, fmt, implementation, residuals, cotangent):
    return cotangent, None, None, None, None, None


_guided.defvjp(_forward, _backward)
