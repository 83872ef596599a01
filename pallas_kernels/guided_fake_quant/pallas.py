"""Guided rounding as a Pallas kernel: the tensor and its record are each read once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped, UInt8

from pallas_kernels import pairs
from pallas_kernels.arithmetic import float_bits, magnitude_bits, stored_value
from pallas_kernels.formats import NVFP4, BlockFormat
from pallas_kernels.groups import Groups, block_amax, octets, plan, rounding_of
from pallas_kernels.guided_fake_quant import pairwise, pairwise_e8m0
from pallas_kernels.guided_fake_quant.rule import guided_terms
from pallas_kernels.pair_terms import amax_bits
from pallas_kernels.sources import Source, stored
from pallas_kernels.words import bytes_word, word_bits, word_codes


def _body(tiles, scales_ref, *refs, source: Source, kind: str, groups: Groups):
    fmt = groups.fmt
    *record_ref, whole, valid_ref, own_ref, rollout_ref, out_ref = refs if fmt.has_multiplier else (*refs[:-1], None, None, refs[-1])
    slices = octets(out_ref)
    loaded = source.read(tiles, whole)
    scales = scales_ref[...].astype(jnp.int32)
    valid = groups.of_rows(valid_ref)
    own, rollout = (None if ref is None else groups.of_rows(ref) for ref in (own_ref, rollout_ref))
    mantissas = bytes_word(record_ref[0][...]) if kind == "mantissa" else None
    parts = source.octets(loaded)

    def codes(number):
        return bytes_word(record_ref[0][:, 4 * number : 4 * number + 4])

    def general():
        of_block, of_value = (scales[:, None], valid[:, None], _column(own), _column(rollout)), (kind, fmt, rounding_of(out_ref.dtype))
        values = [part.astype(jnp.float32) for part in parts]
        amax = block_amax([magnitude_bits(x) for x in values])
        for number, (octet, x) in enumerate(zip(slices, values, strict=True)):
            record = None
            if mantissas is not None:
                record = word_bits(mantissas, 8 * number)
            elif kind == "codes":
                record = word_codes(codes(number))
            value, factor, pre = guided_terms(x, amax, record, *of_block, *of_value)
            out_ref[:, octet] = stored_value(value, float_bits(x), factor, pre, out_ref.dtype)

    def in_pairs(rule, records, constants_of):
        stored_parts = [part.astype(jnp.bfloat16) for part in parts]
        constants = constants_of(amax_bits(stored_parts, groups.interpret), scales, valid)
        for octet, part, record in zip(slices, stored_parts, records, strict=True):
            out_ref[:, octet] = pairs.apply(rule, [part], [record, *constants], jnp.bfloat16, groups.interpret)

    def in_nvfp4_pairs(mantissas, own, rollout):
        constants_of = functools.partial(pairwise.guided_constants, multiplier=own, rollout_multiplier=rollout)
        in_pairs(pairwise.guided, pairwise.record_words(mantissas, len(parts)), constants_of)

    def in_e8m0_pairs():
        constants_of = functools.partial(pairwise_e8m0.guided_constants, kind=kind)
        if mantissas is not None:
            in_pairs(pairwise_e8m0.guided_by_bit, pairwise.record_words(mantissas, len(parts)), constants_of)
        elif kind == "codes":
            in_pairs(pairwise_e8m0.guided_by_code, [codes(number).astype(jnp.int32) for number in range(len(parts))], constants_of)
        else:
            # Where no bit counts as known any will do.
            in_pairs(pairwise_e8m0.guided_by_bit, [jnp.zeros(1, jnp.int32)] * len(parts), constants_of)

    if out_ref.dtype != jnp.bfloat16:
        general()
    elif own is None or rollout is None:
        in_e8m0_pairs()
    elif fmt.block == NVFP4.block and mantissas is not None:
        jax.lax.cond(pairwise.fits(own, rollout), functools.partial(in_nvfp4_pairs, mantissas, own, rollout), general)
    else:
        general()


def _column(value: Shaped[Array, " n"] | None) -> Shaped[Array, "n 1"] | None:
    return None if value is None else value[:, None]


def rounded(
    source: Source,
    groups: Groups,
    kind: str,
    data: UInt8[Array, "*rows bytes"] | None,
    scales: UInt8[Array, "*rows blocks"],
    valid: Bool[Array, "*#rows"],
    multiplier: Float[Array, "*#rows"] | None,
    rollout_multiplier: Float[Array, "*#rows"] | None,
) -> Float[Array, "*rows d"]:
    """The values of a source rounded under the record."""
    inputs, whole = [source.tiles, groups.from_last(scales, 1)[:, 0]], [source.whole, groups.row_values(valid)]
    if multiplier is not None and rollout_multiplier is not None:
        whole += [groups.row_values(multiplier), groups.row_values(rollout_multiplier)]
    if data is not None:
        inputs.append(groups.from_last(data, groups.fmt.block // (8 if kind == "mantissa" else 2)))
    body = functools.partial(_body, source=source, kind=kind, groups=groups)
    (out,) = groups.call(body, inputs, [groups.out(groups.fmt.block, source.dtype)], whole)
    return groups.to_last(out, groups.size)


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
    return rounded(stored(x, groups), groups, kind, data, scales, valid, multiplier, rollout_multiplier)
