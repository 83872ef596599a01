"""Guided rounding as a Pallas kernel: the tensor and its record are each read once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.arithmetic import float_bits, magnitude_bits, stored_value
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import block_amax, column, octets, plan, rounding_of
from pallas_kernels.guided_fake_quant.rule import guided_terms
from pallas_kernels.words import word_bits, word_codes


def _body(*refs, kind: str, fmt: BlockFormat):
    x_ref, scales_ref, valid_ref, *rest, out_ref = refs
    parts = [x_ref[:, octet].astype(jnp.float32) for octet in octets(x_ref)]
    amax = block_amax([magnitude_bits(x) for x in parts])
    own = rollout = None
    if fmt.has_multiplier:
        own, rollout = column(rest[0]), column(rest[1])
    scales = column(scales_ref).astype(jnp.int32)
    valid = column(valid_ref).astype(jnp.int32) != 0
    for number, (octet, x) in enumerate(zip(octets(x_ref), parts, strict=True)):
        record = None
        if kind == "mantissa":
            record = word_bits(rest[-1][...], 8 * number)
        elif kind == "codes":
            record = word_codes(rest[-1][:, number])
        value, factor, pre = guided_terms(x, amax, record, scales, valid, own, rollout, kind, fmt, rounding_of(x_ref.dtype))
        out_ref[:, octet] = stored_value(value, float_bits(x), factor, pre, out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("kind", "fmt", "interpret"))
def guided_fake_quant(
    x: Float[Array, "*rows d"],
    data: UInt8[Array, "*rows bytes"] | None,
    scales: UInt8[Array, "*rows blocks"],
    valid: Bool[Array, "*#rows"],
    multiplier: Float[Array, "*#rows"] | None,
    rollout_multiplier: Float[Array, "*#rows"] | None,
    kind: str,
    fmt: BlockFormat,
    interpret: bool | None = None,
) -> Float[Array, "*rows d"]:
    """x rounded under the record, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan(x.shape, fmt, interpret)
    inputs = [groups.from_last(x, fmt.block), groups.words(scales, 1), groups.from_rows(valid.astype(jnp.uint8))]
    if multiplier is not None and rollout_multiplier is not None:
        inputs += [groups.from_rows(multiplier), groups.from_rows(rollout_multiplier)]
    if data is not None:
        inputs.append(groups.words(data, fmt.block // (8 if kind == "mantissa" else 2)))
    body = functools.partial(_body, kind=kind, fmt=fmt)
    (out,) = groups.call(body, inputs, [groups.out(fmt.block, x.dtype)])
    return groups.to_last(out, groups.size)
