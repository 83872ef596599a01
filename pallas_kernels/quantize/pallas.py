"""Quantization as a Pallas kernel: one pass over x, codes and scales out."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels import pairs
from pallas_kernels.arithmetic import bits_float, encode_block, encode_gain, float_bits, magnitude_bits, scale_code
from pallas_kernels.formats import NVFP4, BlockFormat
from pallas_kernels.groups import Groups, block_amax, octets, plan, rounding_of
from pallas_kernels.pair_terms import amax_bits
from pallas_kernels.quantize import pairwise, pairwise_e8m0
from pallas_kernels.words import signed_word, word_bytes


def _body(x_ref, *refs, fmt: BlockFormat, groups: Groups):
    *multiplier_ref, codes_ref, scales_ref = refs
    parts = [groups.load(x_ref, octet) for octet in octets(fmt.block)]
    multiplier = groups.of_rows(multiplier_ref[0]) if fmt.has_multiplier else None

    def general():
        values = [part.astype(jnp.float32) for part in parts]
        magnitudes = [magnitude_bits(x) for x in values]
        scales, gain, step = encode_block(block_amax(magnitudes), None if multiplier is None else multiplier[:, None])
        for number, (x, magnitude) in enumerate(zip(values, magnitudes, strict=True)):
            index = rounding_of(x_ref.dtype).nearest_index(bits_float(magnitude) * gain, step, fmt)
            word = jnp.where(step[:, 0] > 0.0, signed_word(index, float_bits(x)), 0)
            codes_ref[:, 4 * number : 4 * number + 4] = word_bytes(word)
        scales_ref[...] = scales[:, 0].astype(jnp.uint8)

    def in_pairs(rule, scales, constants):
        # As many octets at once as make a store of eight bytes.
        for start in range(0, len(parts), 2):
            packed = pairs.apply(rule, parts[start : start + 2], constants, jnp.uint8, groups.interpret, pairwise.packed)
            codes_ref[:, 4 * start : 4 * start + 8] = packed
        scales_ref[...] = scales.astype(jnp.uint8)

    def in_nvfp4_pairs(multiplier):
        gain = encode_gain(multiplier)
        amax = amax_bits(parts, groups.interpret)
        scales = scale_code(jnp.where(amax < 1 << 23, 0, amax), gain)
        in_pairs(pairwise.nearest, scales, pairwise.nearest_constants(scales, gain))

    bfloat16 = x_ref.dtype == jnp.bfloat16
    if bfloat16 and multiplier is None and fmt.block >= 16:
        scales = scale_code(amax_bits(parts, groups.interpret), None)
        in_pairs(pairwise_e8m0.nearest, scales, pairwise_e8m0.nearest_constants(scales))
    elif bfloat16 and multiplier is not None and fmt.block == NVFP4.block:
        jax.lax.cond(pairwise.fits(multiplier), functools.partial(in_nvfp4_pairs, multiplier), general)
    else:
        general()


@functools.partial(jax.jit, static_argnames=("fmt", "interpret"))
def quantize(
    x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat, interpret: bool | None = None
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows blocks"]]:
    """Packed codes and scale bytes of x, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan(x.shape, fmt, interpret)
    outputs = [groups.out(fmt.block // 2, jnp.uint8), groups.out(1, jnp.uint8)]
    whole = [] if multiplier is None else [groups.row_values(multiplier)]
    codes, scales = groups.call(functools.partial(_body, fmt=fmt, groups=groups), [groups.from_last(x, fmt.block)], outputs, whole)
    return groups.to_last(codes, fmt.codes_bytes(groups.size)), groups.to_last(scales, groups.blocks)
