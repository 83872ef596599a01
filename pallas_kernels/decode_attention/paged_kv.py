"""The paged FP4 key/value cache of one layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, Integer, UInt8, UInt16

from pallas_kernels.formats import BlockFormat
from pallas_kernels.pytrees import register_arrays


@register_arrays
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values in pages of tokens: token `p` of sequence `b` is slot `p % page_size` of page `page_table[b, p // page_size]`.

    A token and head has D/2 bytes of codes, those of `pallas_kernels.quantize` in their order, and D/16 (NVFP4) or D/32 (MXFP4) scale
    bytes. Both are held as 16-bit little-endian words, which is what the matrix loads of the tensor cores move: the packed tile takes the
    road of a BF16 tile up to the registers. A word of codes is four neighbours. A word of scales is block i (low byte) and block
    i + blocks/2: one half of head_dim then takes all low bytes and the other all high bytes, without a choice by column.

    Within a page the head comes before the slot, so that the tile of one head that a program reads is one contiguous piece of
    memory, which its threads fetch 16 bytes at a time.

    Args:
      key_codes: uint16[pages, K, page_size, D/4].
      key_scales: uint16[pages, K, page_size, blocks/2].
      value_codes: uint16[pages, K, page_size, D/4].
      value_scales: uint16[pages, K, page_size, blocks/2].
      key_multiplier: float32 decode multiplier of all keys, a plain power of two; None for MXFP4.
      value_multiplier: the same for values.
      page_table: int32[B, max_pages], page numbers; entries at or beyond a sequence's length are not read.
      lengths: int32[B], tokens in the cache.
      fmt: the format.
    """

    key_codes: UInt16[Array, "pages K slots words"]
    key_scales: UInt16[Array, "pages K slots pairs"]
    value_codes: UInt16[Array, "pages K slots words"]
    value_scales: UInt16[Array, "pages K slots pairs"]
    key_multiplier: Float[Array, ""] | None
    value_multiplier: Float[Array, ""] | None
    page_table: Int32[Array, "B max_pages"]
    lengths: Int32[Array, " B"]
    fmt: BlockFormat = dataclasses.field(metadata={"static": True})

    @property
    def head_dim(self) -> int:
        """D, values of a head."""
        return 4 * self.key_codes.shape[-1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key_codes.shape[2]


def empty_paged_kv(
    pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    page_table: Integer[ArrayLike, "B max_pages"],
    fmt: BlockFormat,
    key_multiplier: Float[ArrayLike, ""] | None = None,
    value_multiplier: Float[ArrayLike, ""] | None = None,
) -> PagedKV:
    """A cache of zeros with no tokens.

    Args:
      pages: pages of the pool, shared by all sequences.
      page_size: tokens of a page; the Pallas kernel wants a power of two of at least 16.
      kv_heads: K.
      head_dim: D, a multiple of two blocks.
      page_table: int[B, max_pages], which page holds which tokens of a sequence.
      fmt: NVFP4 or MXFP4.
      key_multiplier: float32 decode multiplier (`decode_multiplier(amax, nudged=False)`), for NVFP4 only.
      value_multiplier: the same for values.

    Raises:
      ValueError: sizes that do not fit the format, or a multiplier that is missing or too many.
    """
    if min(pages, page_size, kv_heads, head_dim) < 1 or head_dim % (2 * fmt.block):
        raise ValueError(
            f"cannot make {pages} pages of {page_size} tokens, {kv_heads} heads and head_dim {head_dim}; "
            f"all must be positive and head_dim a multiple of {2 * fmt.block} ({fmt.name})"
        )
    multipliers = key_multiplier, value_multiplier
    if any((multiplier is not None) != fmt.has_multiplier for multiplier in multipliers):
        raise ValueError(f"{fmt.name} takes {'a' if fmt.has_multiplier else 'no'} multiplier for keys and values, got {multipliers}")
    table = jnp.asarray(page_table).astype(jnp.int32)
    codes = (pages, kv_heads, page_size, head_dim // 4)
    scales = (pages, kv_heads, page_size, head_dim // fmt.block // 2)
    key_multiplier, value_multiplier = (None if each is None else jnp.asarray(each).astype(jnp.float32) for each in multipliers)
    return PagedKV(
        key_codes=jnp.zeros(codes, jnp.uint16),
        key_scales=jnp.zeros(scales, jnp.uint16),
        value_codes=jnp.zeros(codes, jnp.uint16),
        value_scales=jnp.zeros(scales, jnp.uint16),
        key_multiplier=key_multiplier,
        value_multiplier=value_multiplier,
        page_table=table,
        lengths=jnp.zeros(table.shape[:1], jnp.int32),
        fmt=fmt,
    )


def codes_to_words(codes: UInt8[Array, "*rows bytes"]) -> UInt16[Array, "*rows words"]:
    """Packed codes as the words of a page."""
    return _words(codes.reshape((*codes.shape[:-1], codes.shape[-1] // 2, 2)))


def scales_to_words(scales: UInt8[Array, "*rows blocks"]) -> UInt16[Array, "*rows pairs"]:
    """Scale bytes as the words of a page: block i and block i + blocks/2."""
    return _words(jnp.swapaxes(scales.reshape((*scales.shape[:-1], 2, scales.shape[-1] // 2)), -1, -2))


def words_to_codes(words: UInt16[Array, "*rows words"]) -> UInt8[Array, "*rows bytes"]:
    """The inverse of `codes_to_words`: the bytes as `pallas_kernels.quantize` gives them."""
    return _bytes(words).reshape((*words.shape[:-1], 2 * words.shape[-1]))


def words_to_scales(words: UInt16[Array, "*rows pairs"]) -> UInt8[Array, "*rows blocks"]:
    """The inverse of `scales_to_words`."""
    return jnp.swapaxes(_bytes(words), -1, -2).reshape((*words.shape[:-1], 2 * words.shape[-1]))


def _words(pairs: UInt8[Array, "*rows 2"]) -> UInt16[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(pairs, jnp.uint16)


def _bytes(words: UInt16[Array, "*rows"]) -> UInt8[Array, "*rows 2"]:
    return jax.lax.bitcast_convert_type(words, jnp.uint8)
