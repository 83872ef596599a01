"""Fake quantization by the Triton kernel."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.formats import BlockFormat
from pallas_kernels.triton_call import launch, over_rows, row_value


@functools.partial(jax.jit, static_argnames="fmt")
def fake_quant(x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat) -> Float[Array, "*rows d"]:
    """x rounded to the format, as the reference. Raises NotImplementedError (see `triton_call.launch`)."""
    return over_rows(functools.partial(_fake_quant, fmt=fmt), (x,), (multiplier,))


def _fake_quant(tensors, values, fmt: BlockFormat):
    (x,), (multiplier,) = tensors, values
    rows = x.shape[:-1]
    multiplier, each_row = row_value(multiplier, rows)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch("fake_quant", (x, multiplier), [out], rows, x.shape[-1], fmt, EACH_ROW=each_row)[0]
