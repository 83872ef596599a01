"""Dequantization by the Triton kernel."""

import functools

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats import BlockFormat
from pallas_kernels.triton_call import launch, over_rows, row_value


@functools.partial(jax.jit, static_argnames=("size", "fmt", "dtype"))
def dequantize(
    codes: UInt8[Array, "*rows bytes"],
    scales: UInt8[Array, "*rows blocks"],
    multiplier: Float[Array, "*#rows"] | None,
    size: int,
    fmt: BlockFormat,
    dtype: DTypeLike,
) -> Float[Array, "*rows d"]:
    """The values in `dtype`, as the reference. Raises NotImplementedError (see `triton_call.launch`)."""
    return over_rows(functools.partial(_dequantize, size=size, fmt=fmt, dtype=dtype), (codes, scales), (multiplier,))


def _dequantize(tensors, values, size: int, fmt: BlockFormat, dtype: DTypeLike):
    (codes, scales), (multiplier,) = tensors, values
    rows = codes.shape[:-1]
    multiplier, each_row = row_value(multiplier, rows)
    out = jax.ShapeDtypeStruct((*rows, size), dtype)
    return launch("dequantize", (codes, scales, multiplier), [out], rows, size, fmt, EACH_ROW=each_row)[0]
