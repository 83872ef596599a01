"""Packing of codes and bits: NumPy twin, round trips, order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mantissa_bits, oracle, pack_bits, pack_codes, unpack_bits, unpack_codes
from tests.pallas_kernels.cases import mismatches, random_bytes


def test_low_nibble_is_the_even_index():
    assert np.asarray(pack_codes(jnp.asarray([2, 3], jnp.uint8))).tolist() == [0x32]


def test_first_bit_is_the_least_significant():
    assert np.asarray(pack_bits(jnp.asarray([1, 0, 0, 0, 0, 0, 0, 0, 1], jnp.uint8))).tolist() == [1, 1]
    assert np.asarray(pack_bits(np.array([False, True]))).tolist() == [2]


def test_p1_unpack_inverts_pack_for_every_byte():
    packed = jnp.arange(256, dtype=jnp.uint8)
    assert mismatches(pack_codes(unpack_codes(packed, 512)), packed) == 0
    assert mismatches(pack_bits(unpack_bits(packed, 2048)), packed) == 0


@pytest.mark.parametrize("size", (1, 7, 8, 9, 16, 31))
def test_equals_numpy_and_round_trips(size):
    codes = random_bytes((3, 2, size), size) % 16
    packed = pack_codes(codes)
    assert packed.shape == (3, 2, -(-size // 2)) and mismatches(packed, oracle.pack_codes(codes)) == 0
    assert mismatches(unpack_codes(packed, size), codes) == 0
    bits = codes % 2
    assert mismatches(pack_bits(bits), oracle.pack_bits(bits)) == 0
    assert mismatches(unpack_bits(pack_bits(bits), size), bits) == 0
    assert mismatches(mantissa_bits(packed, size), oracle.mantissa_bits(np.asarray(packed), size)) == 0
    assert mismatches(unpack_bits(mantissa_bits(packed, size), size), bits) == 0


def test_wrong_length_is_explained():
    with pytest.raises(ValueError, match="5 values take 3 bytes, got 2"):
        unpack_codes(jnp.zeros((4, 2), jnp.uint8), 5)
    with pytest.raises(ValueError, match="take 2 bytes"):
        unpack_bits(jnp.zeros((4, 1), jnp.uint8), 9)
