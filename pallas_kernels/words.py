"""Codes and bits of a group in 32-bit words, inside a Pallas body: a thread packs and unpacks its own words with shifts.

A word holds the bytes of the packed form in little-endian order, so element 0 sits in the lowest bits here as well.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt, UInt32


def signed_words(index: Int[Array, "n block"], sign_bits: Int[Array, "n block"]) -> Int[Array, "n words"]:
    """Eight codes a word: magnitudes 0..7 and the sign of the other argument, which code 0 does not take."""
    codes = (index | ((sign_bits >> 28) & 8)).reshape(index.shape[0], index.shape[1] // 8, 8)
    words = jnp.sum(codes << 4 * _lanes(codes.shape), axis=-1)
    # Adding 7 to a magnitude carries into the sign's bit unless it is 0.
    nonzero = (words & 0x77777777) + 0x77777777
    return words & (nonzero | 0x77777777)


def words_to_codes(words: UInt32[Array, "n words"]) -> Int[Array, "n block"]:
    """The eight codes of each word."""
    shape = (*words.shape, 8)
    nibbles = words.astype(jnp.int32)[..., None] >> 4 * _lanes(shape)
    return (nibbles & 15).reshape(words.shape[0], 8 * words.shape[1])


def word_to_bits(words: UInt[Array, " n"], size: int) -> Int[Array, "n size"]:
    """The lowest `size` bits of each word."""
    return (words.astype(jnp.int32)[:, None] >> _lanes((words.shape[0], size))) & 1


def _lanes(shape: tuple[int, ...]) -> Int[Array, "*s"]:
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
