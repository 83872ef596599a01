"""Dequantization as a Pallas kernel."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.arithmetic import decode_terms, e2m1_magnitude, stored_value
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import column, plan
from pallas_kernels.words import word_codes


def _body(*refs, fmt: BlockFormat):
    codes_ref, scales_ref, *multiplier_ref, out_ref = refs
    multiplier = column(multiplier_ref[0]) if fmt.has_multiplier else None
    factor, pre = decode_terms(column(scales_ref).astype(jnp.int32), multiplier)
    codes = word_codes(codes_ref[...])
    out_ref[...] = stored_value(e2m1_magnitude(codes & 7), codes << 28, factor, pre, out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("size", "fmt", "dtype", "interpret"))
def dequantize(
    codes: UInt8[Array, "*rows bytes"],
    scales: UInt8[Array, "*rows blocks"],
    multiplier: Float[Array, "*#rows"] | None,
    size: int,
    fmt: BlockFormat,
    dtype: DTypeLike,
    interpret: bool | None = None,
) -> Float[Array, "*rows d"]:
    """The values in `dtype`, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan((*codes.shape[:-1], size), fmt, interpret)
    inputs = [groups.words(codes, fmt.block // 2), groups.words(scales, 1)]
    if multiplier is not None:
        inputs.append(groups.from_rows(multiplier))
    (out,) = groups.call(functools.partial(_body, fmt=fmt), inputs, [groups.out(fmt.block, dtype)])
    return groups.to_last(out, size)
