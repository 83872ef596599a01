"""Eight codes or bits in a word, inside a Pallas body: a thread packs and unpacks its own words with shifts.

A word holds the bytes of the packed form in little-endian order, so element 0 sits in the lowest bits here as well.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt, UInt8, UInt32


def signed_word(index: Int[Array, "n 8"], sign_bits: Int[Array, "n 8"]) -> UInt32[Array, " n"]:
    """Eight codes: magnitudes 0..7 and the sign of the other argument, which code 0 does not take."""
    codes = index | ((sign_bits >> 28) & 8)
    word = jnp.sum(codes << 4 * _lanes(codes.shape), axis=1)
    # Adding 7 to a magnitude carries into the sign's bit unless it is 0.
    nonzero = (word & 0x77777777) + 0x77777777
    return (word & (nonzero | 0x77777777)).astype(jnp.uint32)


def word_codes(word: UInt32[Array, "n ..."]) -> Int[Array, "n codes"]:
    """The eight codes of each word, or those of all words of a group."""
    shape = (*word.shape, 8)
    return ((word.astype(jnp.int32)[..., None] >> 4 * _lanes(shape)) & 15).reshape(word.shape[0], -1)


def word_bits(word: UInt[Array, " n"], start: int) -> Int[Array, "n 8"]:
    """Eight bits of each word, from bit `start` on."""
    return (word.astype(jnp.int32)[:, None] >> (start + _lanes((word.shape[0], 8)))) & 1


def word_bytes(word: UInt32[Array, " n"]) -> UInt8[Array, "n 4"]:
    """The four bytes of each word, for a kernel that writes bytes: a pass that turns words into bytes afterwards costs as much."""
    return (word[:, None] >> 8 * jax.lax.broadcasted_iota(jnp.uint32, (word.shape[0], 4), 1)).astype(jnp.uint8)


def bytes_word(values: UInt8[Array, "n bytes"]) -> UInt32[Array, " n"]:
    """Up to four bytes as a word."""
    return jnp.sum(values.astype(jnp.int32) << 8 * _lanes(values.shape), axis=1).astype(jnp.uint32)


def _lanes(shape: tuple[int, ...]) -> Int[Array, "*s"]:
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
