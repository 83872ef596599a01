"""Fake quantization as a Pallas kernel: one read and one write of the tensor."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import float_bits, magnitude_bits, stored_value
from pallas_kernels.fake_quant.rule import nearest_terms
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, block_amax, octets, plan, rounding_of


def _body(x_ref, *refs, fmt: BlockFormat, groups: Groups):
    *multiplier_ref, out_ref = refs
    parts = [x_ref[:, octet].astype(jnp.float32) for octet in octets(x_ref)]
    magnitudes = [magnitude_bits(x) for x in parts]
    amax = block_amax(magnitudes)
    multiplier = groups.of_rows(multiplier_ref[0])[:, None] if fmt.has_multiplier else None
    for octet, x, magnitude in zip(octets(x_ref), parts, magnitudes, strict=True):
        value, factor, pre = nearest_terms(magnitude, amax, multiplier, fmt, rounding_of(x_ref.dtype))
        out_ref[:, octet] = stored_value(value, float_bits(x), factor, pre, out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("fmt", "interpret", "tile"))
def fake_quant(
    x: Float[Array, "*rows d"],
    multiplier: Float[Array, "*#rows"] | None,
    fmt: BlockFormat,
    interpret: bool | None = None,
    tile: int | None = None,
) -> Float[Array, "*rows d"]:
    """x rounded to the format, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan(x.shape, fmt, interpret, tile)
    whole = [] if multiplier is None else [groups.row_values(multiplier)]
    body = functools.partial(_body, fmt=fmt, groups=groups)
    (out,) = groups.call(body, [groups.from_last(x, fmt.block)], [groups.out(fmt.block, x.dtype)], whole)
    return groups.to_last(out, groups.size)
