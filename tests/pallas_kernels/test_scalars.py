"""The multiplier, rounding to bfloat16, counting of non-finite values, and the constants."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import as_stored, count_nonfinite, decode_multiplier, keep_rounding, oracle, round_to_bf16
from pallas_kernels.formats import RECIPROCAL_SIX
from tests.pallas_kernels.cases import BF16, NUDGE, all_bf16, mismatches, normal, producer


def patterns(count: int = 1 << 20) -> np.ndarray:
    """Arbitrary float32 bit patterns, all of bfloat16's neighbourhoods of a tie among them."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, size=count, dtype=np.uint32)
    bits[: count // 2] = (bits[: count // 2] & 0xFFFF0000) | rng.choice([0x7FFF, 0x8000, 0x8001], count // 2).astype(np.uint32)
    return bits.view(np.float32)


def test_the_block_scale_constant_is_the_float32_nearest_to_a_nudged_sixth():
    exact = Fraction(1, 6) * (1 - Fraction(1, 2**17))
    assert np.float32(RECIPROCAL_SIX).view(np.uint32) == 0x3E2AAA55 and float(np.float32(RECIPROCAL_SIX)) == RECIPROCAL_SIX
    step = Fraction(1, 2**26)  # distance of float32 values in [1/8, 1/4)
    assert abs(Fraction(RECIPROCAL_SIX) - exact) <= step / 2


@pytest.mark.parametrize("nudged", (True, False))
def test_multiplier_equals_oracle_for_every_kind_of_amax(nudged):
    amax = np.abs(np.concatenate([patterns(1 << 16), all_bf16().astype(np.float32).ravel()]))
    assert mismatches(decode_multiplier(jnp.asarray(amax), nudged=nudged), oracle.decode_multiplier(amax, nudged=nudged)) == 0


def test_multiplier_by_definition():
    """The largest n with amax * 2^n <= 2688, at the edges."""
    amax = jnp.asarray([2688.0, np.nextafter(np.float32(2688), np.float32(3000)), 1344.0, 1.0, 0.0, np.inf, np.nan], jnp.float32)
    assert np.asarray(decode_multiplier(amax, nudged=False)).tolist() == [1.0, 2.0, 0.5, 2.0**-11, 1.0, 1.0, 1.0]
    assert float(decode_multiplier(jnp.float32(1.0))) == 2.0**-11 * NUDGE
    assert np.asarray(decode_multiplier(jnp.float32(1.0))).view(np.uint32) == 0x3A000040


def test_round_to_bf16_equals_the_cast():
    x = patterns()
    assert mismatches(round_to_bf16(jnp.asarray(x)), oracle.round_to_bf16(x)) == 0


def test_round_to_bf16_gradient_is_the_identity():
    x = jnp.linspace(-3, 3, 64, dtype=jnp.float32)
    weights = jnp.linspace(0, 1e-4, 64, dtype=jnp.float32)
    assert mismatches(jax.grad(lambda x: jnp.sum(round_to_bf16(x) * weights))(x), weights) == 0
    with pytest.raises(ValueError, match="float32"):
        round_to_bf16(jnp.zeros(3, jnp.bfloat16))


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_p9_non_finite_values_are_counted(dtype):
    x = jnp.asarray([[1, np.nan, -np.inf], [np.inf, 0, 3e38]], dtype)
    assert int(count_nonfinite(x)) == 3 and int(count_nonfinite(x[1:, 1:])) == 0


@pytest.mark.parametrize("dtype", (np.float16, BF16, np.float32), ids=("float16", "bfloat16", "float32"))
def test_as_stored_keeps_every_value(dtype):
    """All 65,536 patterns of the narrow dtypes; subnormals of float32's range may become zero, those of float16 stay."""
    x = np.arange(65536, dtype=np.uint16).view(dtype) if np.dtype(dtype).itemsize == 2 else normal((64, 64), 1, np.float32)
    wide = x.astype(np.float32)
    got, kept = np.asarray(as_stored(jnp.asarray(x))), np.asarray(keep_rounding(jnp.asarray(x)))
    assert got.dtype == np.float32 and kept.dtype == x.dtype
    for values in (got, kept.astype(np.float32)):
        same = (values == wide) | (np.isnan(values) & np.isnan(wide)) | ((values == 0) & (np.abs(wide) < 2.0**-126))
        assert same.all(), x[~same][:8]


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16))
def test_as_stored_rounds_what_a_compiler_left_unrounded(dtype):
    """The control: without it, a widened sum of products is not the widened array on at least one of the dtypes."""
    a, b = (jnp.asarray(normal((64, 512), seed, np.float32) * 2.0**-5).astype(dtype) for seed in (1, 2))
    stored = np.asarray(jax.jit(producer)(a, b)).astype(np.float32)
    assert mismatches(jax.jit(lambda a, b: as_stored(producer(a, b)))(a, b), stored) == 0
    if dtype == jnp.bfloat16:
        assert mismatches(jax.jit(lambda a, b: producer(a, b).astype(jnp.float32))(a, b), stored) > 0


def test_keep_rounding_passes_the_gradient():
    x = jnp.asarray(normal((4, 8), 1, BF16))
    gradient = jax.grad(lambda x: jnp.sum(keep_rounding(x) * x))(x)
    assert gradient.dtype == x.dtype and mismatches(gradient, 2 * x) == 0
