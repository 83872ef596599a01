"""Fake quantization as a Pallas kernel: one read and one write of the tensor."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import float_bits, magnitude_bits, stored_value
from pallas_kernels.fake_quant.rule import nearest_terms
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, block_amax, plan, rounding_of
from pallas_kernels.sources import Source, stored


def _body(tiles, whole, *refs, source: Source, groups: Groups):
    *multiplier_ref, out_ref = refs
    multiplier = groups.of_rows(multiplier_ref[0])[:, None] if multiplier_ref else None
    loaded = source.read(tiles, whole)

    def block(octets):
        values = [octet.astype(jnp.float32) for octet in octets]
        magnitudes = [magnitude_bits(x) for x in values]
        amax = block_amax(magnitudes)
        for x, magnitude in zip(values, magnitudes, strict=True):
            value, factor, pre = nearest_terms(magnitude, amax, multiplier, groups.fmt, rounding_of(out_ref.dtype))
            yield stored_value(value, float_bits(x), factor, pre, out_ref.dtype)

    groups.store(out_ref, [list(block(octets)) for octets in source.octets(loaded)])


def rounded(source: Source, groups: Groups, multiplier: Float[Array, "*#rows"] | None) -> Float[Array, "*rows d"]:
    """The values of a source rounded to the format of the groups."""
    row_values = [] if multiplier is None else [groups.row_values(multiplier)]
    body = functools.partial(_body, source=source, groups=groups)
    (out,) = groups.call(body, [source.tiles], [groups.out(groups.fmt.block, source.dtype)], [source.whole, *row_values])
    return groups.to_last(out, groups.size)


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
    return rounded(stored(x, groups), groups, multiplier)
