"""Dequantization as a Pallas kernel.

A group is eight values: one word of codes in, sixteen bytes out, and those of neighbouring threads lie next to each other. The scale is
read by every group of its block, from the cache all but once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import pairs, tilings
from pallas_kernels.arithmetic import decode_terms, e2m1_magnitude, stored_value
from pallas_kernels.dequantize import pairwise
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, plan
from pallas_kernels.words import bytes_word, word_codes

_VALUES = 8


def _body(codes_ref, scales_ref, *refs, groups: Groups):
    *multiplier_ref, out_ref = refs
    # Read before anything waits, so that all loads are under way at once.
    word = bytes_word(codes_ref[...])
    scales = groups.of_blocks(scales_ref).astype(jnp.int32)
    multiplier = groups.of_rows(multiplier_ref[0]) if multiplier_ref else None

    def general():
        factor, pre = decode_terms(scales[:, None], None if multiplier is None else multiplier[:, None])
        codes = word_codes(word)
        out_ref[...] = stored_value(e2m1_magnitude(codes & 7), codes << 28, factor, pre, out_ref.dtype)

    def in_nvfp4_pairs(multiplier):
        out_ref[...] = pairs.expand(pairwise.decoded, word, pairwise.constants(scales, multiplier), groups.interpret)

    if out_ref.dtype != jnp.bfloat16:
        general()
    elif multiplier is None:
        out_ref[...] = pairs.expand(pairwise.decoded_e8m0, word, pairwise.constants_e8m0(scales), groups.interpret)
    else:
        jax.lax.cond(pairwise.fits(multiplier), functools.partial(in_nvfp4_pairs, multiplier), general)


@functools.partial(jax.jit, static_argnames=("size", "fmt", "dtype", "interpret", "tile", "warps"))
def dequantize(
    codes: UInt8[Array, "*rows bytes"],
    scales: UInt8[Array, "*rows blocks"],
    multiplier: Float[Array, "*#rows"] | None,
    size: int,
    fmt: BlockFormat,
    dtype: DTypeLike,
    interpret: bool | None = None,
    tile: int | None = None,
    warps: int | None = None,
) -> Float[Array, "*rows d"]:
    """The values in `dtype`, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    sizes = tilings.lookup("dequantize")
    shape = (*codes.shape[:-1], size)
    groups = plan(shape, fmt, interpret, tile or sizes["tile"], part=_VALUES, warps=warps or sizes["num_warps"])
    whole = [scales.reshape(-1)] if multiplier is None else [scales.reshape(-1), groups.row_values(multiplier)]
    body = functools.partial(_body, groups=groups)
    (out,) = groups.call(body, [groups.from_last(codes, _VALUES // 2)], [groups.out(_VALUES, dtype)], whole)
    return groups.to_last(out, size)
