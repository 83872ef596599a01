"""Dequantization as a Pallas kernel."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import pairs
from pallas_kernels.arithmetic import decode_terms, e2m1_magnitude, stored_value
from pallas_kernels.dequantize import pairwise
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, octets, plan
from pallas_kernels.words import bytes_word, word_codes


def _body(codes_ref, scales_ref, *refs, fmt: BlockFormat, groups: Groups):
    *multiplier_ref, out_ref = refs
    # Read before anything waits, so that all loads are under way at once.
    packed = [groups.load(codes_ref, part) for part in octets(fmt.block // 2)]
    scales = scales_ref[...].astype(jnp.int32)
    multiplier = groups.of_rows(multiplier_ref[0]) if fmt.has_multiplier else None

    def general():
        factor, pre = decode_terms(scales[:, None], None if multiplier is None else multiplier[:, None])
        out = []
        for octet in octets(fmt.block):
            codes = word_codes(bytes_word(codes_ref[:, octet.start // 2 : octet.stop // 2]))
            out.append(stored_value(e2m1_magnitude(codes & 7), codes << 28, factor, pre, out_ref.dtype))
        return out

    def in_pairs():
        factors = pairwise.constants(scales, multiplier)
        numbers = range(fmt.block // 8)
        return [pairs.expand(pairwise.decoded, packed[number // 2], number % 2, factors, groups.interpret) for number in numbers]

    if out_ref.dtype == jnp.bfloat16 and fmt.block >= 16:
        out = jax.lax.cond(pairwise.fits(scales, multiplier), in_pairs, general)
    else:
        out = general()
    groups.store(out_ref, [out])


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
    inputs = [groups.from_last(codes, fmt.block // 2), groups.from_last(scales, 1)]
    whole = [] if multiplier is None else [groups.row_values(multiplier)]
    body = functools.partial(_body, fmt=fmt, groups=groups)
    (out,) = groups.call(body, inputs, [groups.out(fmt.block, dtype)], whole)
    return groups.to_last(out, size)
