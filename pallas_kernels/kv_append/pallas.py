"""Appending as one Pallas kernel: a program quantizes all heads of a token and stores them into their page, in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.arithmetic import bits_float, encode_block, float_bits, magnitude_bits
from pallas_kernels.decode_attention.paged_kv import PagedKV
from pallas_kernels.device import interpreted
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import block_amax, rounding_of
from pallas_kernels.words import signed_word

_LARGEST_OFFSET = 2**31 - 1


def _body(*refs, fmt: BlockFormat):
    pages_ref, slots_ref, keys_ref, values_ref, *rest = refs
    multiplier_refs, outputs = rest[:-8], rest[-4:]  # between them the four inputs that the outputs overwrite
    token = pl.program_id(0)
    page, slot = pages_ref[token], slots_ref[token]
    at = jnp.maximum(page, 0), slot
    for side, x_ref in enumerate((keys_ref, values_ref)):
        multiplier = multiplier_refs[side][...][:, None] if fmt.has_multiplier else None
        _write(x_ref, token, multiplier, outputs[2 * side], outputs[2 * side + 1], at, page >= 0, fmt)


def _write(x_ref, token, multiplier, codes_ref, scales_ref, at, kept, fmt: BlockFormat):
    """One side of a token. A row of a tile is one block; the blocks i and i + blocks/2, whose scales share a word, take turns."""
    _, kv_heads, _, pairs, _ = x_ref.shape
    rows = jnp.arange(kv_heads * pairs, dtype=jnp.int32)
    heads, block = rows // pairs, rows % pairs
    page, slot = at
    mask = jnp.broadcast_to(kept, rows.shape)
    scale_word = jnp.zeros(rows.shape, jnp.int32)
    for half in range(2):
        octets = [x_ref[token, heads, half, block, pl.ds(start, 8)].astype(jnp.float32) for start in range(0, fmt.block, 8)]
        magnitudes = [magnitude_bits(octet) for octet in octets]
        scales, gain, step = encode_block(block_amax(magnitudes), multiplier)
        scale_word = scale_word | scales[:, 0] << 8 * half
        for number, (octet, magnitude) in enumerate(zip(octets, magnitudes, strict=True)):
            index = rounding_of(x_ref.dtype).nearest_index(bits_float(magnitude) * gain, step, fmt)
            codes = jnp.where(step[:, 0] > 0.0, signed_word(index, float_bits(octet)), 0)
            first = ((half * pairs + block) * fmt.block + 8 * number) // 4
            for word in range(2):
                stored = (codes >> 16 * word & 0xFFFF).astype(jnp.uint16)
                pltriton.store(codes_ref.at[page, heads, slot, first + word], stored, mask=mask)
    pltriton.store(scales_ref.at[page, heads, slot, block], scale_word.astype(jnp.uint16), mask=mask)


@functools.partial(jax.jit, static_argnames="interpret")
def append(
    cache: PagedKV,
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    pages: Int32[Array, "B T"],
    slots: Int32[Array, "B T"],
    interpret: bool | None = None,
) -> PagedKV:
    """The cache with tokens written at (page, slot), page -1 dropped, as the reference; NotImplementedError if it cannot serve."""
    interpret = interpreted(interpret)
    batch, tokens, kv_heads, size = keys.shape
    pairs = size // cache.fmt.block // 2
    rows = kv_heads * pairs
    if rows & (rows - 1):
        raise NotImplementedError(f"the kernel takes a power of two of KV heads times pairs of blocks, not {kv_heads} x {pairs}")
    if not 0 < max(cache.key_codes.size, keys.size) <= _LARGEST_OFFSET or 0 in (keys.size, cache.key_codes.size):
        raise NotImplementedError(f"the kernel addresses 1 to {_LARGEST_OFFSET} values, got {keys.shape} into {cache.key_codes.shape}")
    blocks = (batch * tokens, kv_heads, 2, pairs, cache.fmt.block)
    multipliers = [each.reshape(1) for each in (cache.key_multiplier, cache.value_multiplier) if each is not None]
    inputs = [pages.reshape(-1), slots.reshape(-1), keys.reshape(blocks), values.reshape(blocks), *multipliers]
    stores = [cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales]
    stored = pl.pallas_call(
        functools.partial(_body, fmt=cache.fmt),
        grid=(batch * tokens,),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in stores],
        input_output_aliases={len(inputs) + number: number for number in range(4)},
        compiler_params=pltriton.CompilerParams(num_warps=max(1, min(4, rows // 32))),
        interpret=interpret,
    )(*inputs, *stores)
    names = "key_codes", "key_scales", "value_codes", "value_scales"
    return dataclasses.replace(cache, **dict(zip(names, stored, strict=True)))
