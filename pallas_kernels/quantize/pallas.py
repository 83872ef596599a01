"""Quantization as a Pallas kernel: one pass over x, codes and scales out."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.arithmetic import bits_float, encode_block, float_bits, magnitude_bits
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import block_amax, column, octets, plan, rounding_of
from pallas_kernels.words import signed_word


def _body(*refs, fmt: BlockFormat):
    x_ref, *multiplier_ref, codes_ref, scales_ref = refs
    parts = [x_ref[:, octet].astype(jnp.float32) for octet in octets(x_ref)]
    magnitudes = [magnitude_bits(x) for x in parts]
    scales, gain, step = encode_block(block_amax(magnitudes), column(multiplier_ref[0]) if fmt.has_multiplier else None)
    for number, (x, magnitude) in enumerate(zip(parts, magnitudes, strict=True)):
        index = rounding_of(x_ref.dtype).nearest_index(bits_float(magnitude) * gain, step, fmt)
        codes_ref[:, number] = jnp.where(step[:, 0] > 0.0, signed_word(index, float_bits(x)), 0)
    scales_ref[...] = scales[:, 0].astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=("fmt", "interpret"))
def quantize(
    x: Float[Array, "*rows d"], multiplier: Float[Array, "*#rows"] | None, fmt: BlockFormat, interpret: bool | None = None
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows blocks"]]:
    """Packed codes and scale bytes of x, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan(x.shape, fmt, interpret)
    inputs = [groups.from_last(x, fmt.block)]
    if multiplier is not None:
        inputs.append(groups.from_rows(multiplier))
    outputs = [groups.out(fmt.block // 8, jnp.uint32), groups.out(1, jnp.uint8)]
    codes, scales = groups.call(functools.partial(_body, fmt=fmt), inputs, outputs)
    return groups.to_bytes(codes, fmt.codes_bytes(groups.size)), groups.to_bytes(scales, groups.blocks)
