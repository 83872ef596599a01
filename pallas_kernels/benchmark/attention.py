"""The paged FP4 cache: attention of one token over it, and appending to it."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt16

from pallas_kernels.benchmark import peers
from pallas_kernels.benchmark.cases import Case, Setting, against_reference
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.decode_attention.api import decode_attention
from pallas_kernels.decode_attention.paged_kv import PagedKV, empty_paged_kv
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.kv_append.api import append
from pallas_kernels.shapes import DECODE, SMALL_DECODE, AttentionShape

_PAGE_SIZE = 64
_SMALL_PAGE_SIZE = 16
_JUDGED_HEAD_DIM = 128
_ONE_BYTES = {"e4m3": 0x38, "e8m0": 0x7F}
"""The scale byte of 1 by the format's kind of scale."""


def decode(setting: Setting) -> Iterator[Case]:
    """`decode_attention`; in MXFP4 only the first shape, and no toy one."""
    for fmt, chosen in ((NVFP4, SMALL_DECODE if setting.toy else DECODE), (MXFP4, () if setting.toy else DECODE[:1])):
        for shape in chosen:
            cache, query = _full_cache(shape, fmt, setting), _normal(0, shape.batch, shape.heads, shape.head_dim)
            scale = shape.head_dim**-0.5
            calls = {
                name: Call(functools.partial(decode_attention, scale=scale, implementation=name), (query, cache))
                for name in setting.implementations
            }
            moved = 2 * query.nbytes + _token_bytes(cache) * shape.batch * shape.tokens
            flops = 4 * shape.batch * shape.tokens * shape.heads * shape.head_dim
            op, text = f"decode_attention/{fmt.name}", _text(shape)
            if setting.toy:
                yield from against_reference(op, text, calls, moved, flops)
                continue
            stored = (shape.batch, shape.tokens, shape.kv_heads, shape.head_dim)
            rivals = peers.bf16_attention(query, _normal(1, *stored), _normal(2, *stored))
            target = Target("ratio", 0.55) if shape.head_dim == _JUDGED_HEAD_DIM else None
            yield Case(op, "pallas", text, calls["pallas"], moved, flops, rivals, target)


def append_tokens(setting: Setting) -> Iterator[Case]:
    """`kv_append` in place: a token of every sequence, and a stretch of a prompt."""
    shape = (SMALL_DECODE if setting.toy else DECODE)[0]
    for fmt in (NVFP4,) if setting.toy else (NVFP4, MXFP4):
        for tokens in (1,) if setting.toy else (1, shape.tokens // 16):
            cache = _full_cache(shape, fmt, setting)
            keys, values = (_normal(seed, shape.batch, tokens, shape.kv_heads, shape.head_dim) for seed in range(2))
            positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (shape.batch, tokens))
            calls = {
                name: Call(functools.partial(append, implementation=name), (cache, keys, values, positions), in_place=True)
                for name in setting.implementations
            }
            moved = keys.nbytes + values.nbytes + _token_bytes(cache) * shape.batch * tokens
            yield from against_reference(f"kv_append/{fmt.name}", f"{tokens} new, {_text(shape)}", calls, moved)


def _full_cache(shape: AttentionShape, fmt: BlockFormat, setting: Setting) -> PagedKV:
    """A cache of random codes and scales, full, its pages in random order."""
    page_size = _SMALL_PAGE_SIZE if setting.toy else _PAGE_SIZE
    rng = np.random.default_rng(0)
    table = rng.permutation(shape.batch * shape.tokens // page_size).reshape(shape.batch, -1)
    multiplier = 2.0**-4 if fmt.has_multiplier else None
    cache = empty_paged_kv(table.size, page_size, shape.kv_heads, shape.head_dim, table, fmt, multiplier, multiplier)
    one = _ONE_BYTES[fmt.scale]

    def codes(seed: int) -> UInt16[Array, "*words"]:
        return jax.random.bits(jax.random.key(seed), cache.key_codes.shape, jnp.uint16)

    def scales(seed: int) -> UInt16[Array, "*words"]:
        low, high = (jax.random.randint(key, cache.key_scales.shape, one - 4, one) for key in jax.random.split(jax.random.key(seed)))
        return (low | high << 8).astype(jnp.uint16)

    return dataclasses.replace(
        cache,
        key_codes=codes(0),
        value_codes=codes(1),
        key_scales=scales(2),
        value_scales=scales(3),
        lengths=jnp.full((shape.batch,), shape.tokens, jnp.int32),
    )


def _token_bytes(cache: PagedKV) -> int:
    """Bytes of a token's keys and values of all KV heads."""
    pages, _, page_size, _ = cache.key_codes.shape
    parts = (cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales)
    return sum(part.nbytes for part in parts) // (pages * page_size)


def _text(shape: AttentionShape) -> str:
    return f"batch {shape.batch}, {shape.tokens} tokens, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"


def _normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
