"""Guided rounding by the Triton kernel."""

import functools

import jax
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.formats import BlockFormat
from pallas_kernels.triton_call import launch, over_rows, row_value


@functools.partial(jax.jit, static_argnames=("kind", "fmt"))
def guided_fake_quant(
    x: Float[Array, "*rows d"],
    data: UInt8[Array, "*rows bytes"] | None,
    scales: UInt8[Array, "*rows blocks"],
    valid: Bool[Array, "*#rows"],
    multiplier: Float[Array, "*#rows"] | None,
    rollout_multiplier: Float[Array, "*#rows"] | None,
    kind: str,
    fmt: BlockFormat,
) -> Float[Array, "*rows d"]:
    """x rounded under the record, as the reference. Raises NotImplementedError (see `triton_call.launch`)."""
    return over_rows(functools.partial(_guided, kind=kind, fmt=fmt), (x, data, scales), (valid, multiplier, rollout_multiplier))


def _guided(tensors, values, kind: str, fmt: BlockFormat):
    x, data, scales = tensors
    rows = x.shape[:-1]
    (valid, valid_each_row), (own, each_row), (rollout, rollout_each_row) = (row_value(value, rows) for value in values)
    # A scales record has no data; the kernel then reads none.
    inputs = (x, scales if data is None else data, scales, valid, own, rollout)
    constants = {"KIND": kind, "VALID_EACH_ROW": valid_each_row, "EACH_ROW": each_row, "ROLLOUT_EACH_ROW": rollout_each_row}
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch("guided_fake_quant", inputs, [out], rows, x.shape[-1], fmt, **constants)[0]
