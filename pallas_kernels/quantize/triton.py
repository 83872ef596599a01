"""Quantization by the Triton kernel."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats import BlockFormat
from pallas_kernels.triton_call import launch, over_rows, row_value


@functools.partial(jax.jit, static_argnames="fmt")
def quantize(
    x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows blocks"]]:
    """Packed codes and scale bytes of x, as the reference. Raises NotImplementedError (see `triton_call.launch`)."""
    return over_rows(functools.partial(_quantize, fmt=fmt), (x,), (multiplier,))


def _quantize(tensors, values, fmt: BlockFormat):
    (x,), (multiplier,) = tensors, values
    *rows, size = x.shape
    multiplier, each_row = row_value(multiplier, rows)
    outputs = [jax.ShapeDtypeStruct((*rows, width), jnp.uint8) for width in (fmt.codes_bytes(size), fmt.scales_bytes(size))]
    return tuple(launch("quantize", (x, multiplier), outputs, rows, size, fmt, EACH_ROW=each_row))
