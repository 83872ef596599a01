"""Two codes or eight bits a byte. The first element sits in the lowest bits, as in every public FP4 layout.

NumPy arrays and jax arrays are both accepted; the result is a jax array (`pallas_kernels.oracle` has the NumPy twins).
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Integer, UInt8

from pallas_kernels.blocks import pad_last


def pack_codes(codes: Integer[ArrayLike, "*rows d"]) -> UInt8[Array, "*rows bytes"]:
    """Codes 0..15 to ceil(d/2) bytes: the low nibble is the even index, a missing last code is 0."""
    codes = _padded(jnp.asarray(codes).astype(jnp.uint8), 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: UInt8[ArrayLike, "*rows bytes"], size: int) -> UInt8[Array, "*rows d"]:
    """The first `size` codes of packed bytes, one a byte."""
    packed = jnp.asarray(packed)
    _check_length(packed, size, 2)
    return interleave_nibbles(packed)[..., :size].astype(jnp.uint8)


def pack_bits(bits: Integer[ArrayLike, "*rows d"] | Bool[ArrayLike, "*rows d"]) -> UInt8[Array, "*rows bytes"]:
    """Zeros and ones (or bools) to ceil(d/8) bytes, least significant bit first."""
    bits = jnp.asarray(bits).astype(jnp.int32)
    padded = _padded(bits, 8)
    octets = padded.reshape((*padded.shape[:-1], padded.shape[-1] // 8, 8))
    shifts = jnp.arange(8, dtype=jnp.int32).reshape((1,) * (octets.ndim - 1) + (8,))
    return jnp.sum(octets << shifts, axis=-1).astype(jnp.uint8)


def unpack_bits(packed: UInt8[ArrayLike, "*rows bytes"], size: int) -> UInt8[Array, "*rows d"]:
    """The first `size` bits of packed bytes, one a byte."""
    packed = jnp.asarray(packed)
    _check_length(packed, size, 8)
    return spread_bits(packed)[..., :size].astype(jnp.uint8)


def mantissa_bits(codes_packed: UInt8[ArrayLike, "*rows bytes"], size: int) -> UInt8[Array, "*rows bits"]:
    """The low bit of each of `size` packed codes, packed: the one-bit guidance record of a full record."""
    return pack_bits(unpack_codes(codes_packed, size) & 1)


def interleave_nibbles(packed: UInt8[Array, "*rows bytes"]) -> Int[Array, "*rows nibbles"]:
    """All nibbles of the last axis as int32, low one first. Also runs inside a Pallas body."""
    word = packed.astype(jnp.int32)
    return jnp.stack([word & 15, word >> 4], axis=-1).reshape((*packed.shape[:-1], 2 * packed.shape[-1]))


def spread_bits(packed: UInt8[Array, "*rows bytes"]) -> Int[Array, "*rows bits"]:
    """All bits of the last axis as int32, lowest first. Also runs inside a Pallas body."""
    word = packed.astype(jnp.int32)[..., None]
    lane = jnp.arange(8, dtype=jnp.int32).reshape((1,) * packed.ndim + (8,))
    return ((word >> lane) & 1).reshape((*packed.shape[:-1], 8 * packed.shape[-1]))


def _padded(values: Integer[Array, "*rows d"], width: int) -> Integer[Array, "*rows padded"]:
    return pad_last(values, -(-values.shape[-1] // width) * width)


def _check_length(packed: UInt8[Array, "*rows bytes"], size: int, per_byte: int) -> None:
    expected = -(-size // per_byte)
    if packed.shape[-1] != expected:
        raise ValueError(f"{size} values take {expected} bytes, got {packed.shape[-1]}; pass the unpadded number of values")
