"""Guided rounding as a Pallas kernel: the tensor and its record are each read once."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8, UInt32

from pallas_kernels import pairs
from pallas_kernels.arithmetic import float_bits, magnitude_bits, stored_value
from pallas_kernels.formats import NVFP4, BlockFormat
from pallas_kernels.groups import Groups, block_amax, plan, rounding_of
from pallas_kernels.guided_fake_quant import pairwise, pairwise_e8m0
from pallas_kernels.guided_fake_quant.rule import guided_terms
from pallas_kernels.pair_terms import amax_bits
from pallas_kernels.sources import Source, stored
from pallas_kernels.words import bytes_word, word_bits, word_codes


class _Block(NamedTuple):
    """What a group has in a part of the rows: values, scale byte, and of the record a word of bits, or one of codes for each octet."""

    octets: list[Float[Array, "n 8"]]
    scales: Int[Array, " n"]
    record: list[UInt32[Array, " n"]]


def _body(tiles, scales_ref, *refs, source: Source, kind: str, groups: Groups):
    fmt = groups.fmt
    *record_ref, whole, valid_ref, own_ref, rollout_ref, out_ref = refs if fmt.has_multiplier else (*refs[:-1], None, None, refs[-1])
    parts = range(groups.parts)
    scales = [groups.of_blocks(scales_ref, part).astype(jnp.int32) for part in parts]
    words = {"mantissa": [slice(0, fmt.block // 8)], "codes": [slice(at, at + 4) for at in range(0, fmt.block // 2, 4)], "scales": []}
    records = [[bytes_word(groups.load(record_ref[0], each, part)) for each in words[kind]] for part in parts]
    valid = groups.of_rows(valid_ref)
    own, rollout = (None if ref is None else groups.of_rows(ref) for ref in (own_ref, rollout_ref))
    loaded = source.read(tiles, whole)
    blocks = [_Block(*each) for each in zip(source.octets(loaded), scales, records, strict=True)]

    def general():
        return [_rounded_singly(block, valid, own, rollout, kind, fmt, out_ref.dtype) for block in blocks]

    def in_pairs(rule, constants_of):
        return [_rounded_in_pairs(block, valid, kind, rule, constants_of, groups.interpret) for block in blocks]

    if out_ref.dtype != jnp.bfloat16:
        out = general()
    elif own is None or rollout is None:
        rule = pairwise_e8m0.guided_by_code if kind == "codes" else pairwise_e8m0.guided_by_bit
        out = in_pairs(rule, functools.partial(pairwise_e8m0.guided_constants, kind=kind))
    elif fmt.block == NVFP4.block and kind == "mantissa":
        constants_of = functools.partial(pairwise.guided_constants, multiplier=own, rollout_multiplier=rollout)
        out = jax.lax.cond(pairwise.fits(own, rollout), functools.partial(in_pairs, pairwise.guided, constants_of), general)
    else:
        out = general()
    groups.store(out_ref, out)


def _column(value: Shaped[Array, " n"] | None) -> Shaped[Array, "n 1"] | None:
    return None if value is None else value[:, None]


def _rounded_singly(
    block: _Block,
    valid: Bool[Array, " #n"],
    own: Float[Array, " #n"] | None,
    rollout: Float[Array, " #n"] | None,
    kind: str,
    fmt: BlockFormat,
    dtype: DTypeLike,
) -> list[Float[Array, "n 8"]]:
    values = [octet.astype(jnp.float32) for octet in block.octets]
    amax = block_amax([magnitude_bits(x) for x in values])
    of_block = block.scales[:, None], valid[:, None], _column(own), _column(rollout)
    out = []
    for number, x in enumerate(values):
        if kind == "mantissa":
            record = word_bits(block.record[0], 8 * number)
        else:
            record = word_codes(block.record[number]) if kind == "codes" else None
        value, factor, pre = guided_terms(x, amax, record, *of_block, kind, fmt, rounding_of(dtype))
        out.append(stored_value(value, float_bits(x), factor, pre, dtype))
    return out


def _rounded_in_pairs(
    block: _Block,
    valid: Bool[Array, " #n"],
    kind: str,
    rule: pairs.Rule,
    constants_of: Callable[..., list[Int[Array, " #n"]]],
    interpret: bool,
) -> list[Float[Array, "n 8"]]:
    octets = [octet.astype(jnp.bfloat16) for octet in block.octets]
    if kind == "mantissa":
        records = pairwise.record_words(block.record[0], len(octets))
    elif kind == "codes":
        records = [word.astype(jnp.int32) for word in block.record]
    else:
        # Where no bit counts as known any will do.
        records = [jnp.zeros(1, jnp.int32)] * len(octets)
    constants = constants_of(amax_bits(octets, interpret), block.scales, valid)
    return [
        pairs.apply(rule, [octet], [record, *constants], jnp.bfloat16, interpret) for octet, record in zip(octets, records, strict=True)
    ]


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
    inputs, whole = [source.tiles, groups.from_last(scales, 1)], [source.whole, groups.row_values(valid)]
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
