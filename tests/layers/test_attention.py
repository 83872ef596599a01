"""Masks, padding and rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, fake_quant, rope_fake_quant, rope_tables, rotate
from trace_jax.layers.attention import attend, causal_mask
from trace_jax.layers.norm import rms_norm


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def oracle(query, key, value, mask):
    """Grouped-query attention in NumPy float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    repeats = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, repeats, axis=2), np.repeat(value, repeats, axis=2)
    scores = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.asarray(mask)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


def test_mask_is_causal_within_a_segment_and_never_shows_padding():
    positions = jnp.asarray([[0, 1, 0, 1, 0]])
    segments = jnp.asarray([[1, 1, 2, 2, 0]])
    expected = np.zeros((5, 5), bool)
    for query, key in [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3)]:
        expected[query, key] = True
    np.testing.assert_array_equal(causal_mask(positions, segments)[0], expected)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_the_formula(heads, kv_heads):
    query, key, value = random(2, 5, heads, 8), random(2, 5, kv_heads, 8, seed=1), random(2, 5, kv_heads, 8, seed=2)
    positions = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32)[None], (2, 5))
    mask = causal_mask(positions, jnp.ones((2, 5), jnp.int32))
    np.testing.assert_allclose(attend(query, key, value, mask), oracle(query, key, value, mask), rtol=1e-5, atol=1e-6)


def test_bfloat16_runs_under_strict_promotion_and_stays_bfloat16():
    query, key = random(1, 3, 2, 16, dtype=jnp.bfloat16), random(1, 3, 1, 16, seed=1, dtype=jnp.bfloat16)
    mask = jnp.ones((1, 3, 3), bool)
    result = attend(query, key, key, mask)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(result, np.float32), oracle(query, key, key, mask), atol=0.02)


def test_what_stands_in_padding_changes_nothing_and_padding_rows_stay_finite():
    query, key = random(1, 4, 2, 8), random(1, 4, 2, 8, seed=1)
    positions, segments = jnp.asarray([[0, 1, 0, 0]]), jnp.asarray([[1, 1, 0, 0]])
    mask = causal_mask(positions, segments)
    garbage = key.at[:, 2:].set(1e4)
    result = attend(query, key, key, mask)
    np.testing.assert_array_equal(result[:, :2], attend(query, garbage, garbage, mask)[:, :2])
    gradient = jax.grad(lambda q: jnp.sum(attend(q, key, key, mask)))(query)
    assert np.isfinite(result).all() and np.isfinite(gradient).all()


def test_packed_sequences_equal_the_same_sequences_alone():
    query, key, value = random(1, 6, 2, 8), random(1, 6, 2, 8, seed=1), random(1, 6, 2, 8, seed=2)
    packed = attend(query, key, value, causal_mask(jnp.asarray([[0, 1, 2, 0, 1, 2]]), jnp.asarray([[1, 1, 1, 2, 2, 2]])))
    alone = causal_mask(jnp.arange(3, dtype=jnp.int32)[None], jnp.ones((1, 3), jnp.int32))
    for part in (slice(0, 3), slice(3, 6)):
        np.testing.assert_allclose(packed[:, part], attend(query[:, part], key[:, part], value[:, part], alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rope_rotates_half_split_pairs(theta):
    x, positions = random(2, 3, 2, 10), np.asarray([[0, 1, 2], [5, 90, 4000]], np.int32)
    angle = positions[:, :, None].astype(np.float64) * theta ** (-2 * np.arange(5) / 10)
    pairs = np.asarray(x, np.float64)
    rotated = (pairs[..., :5] + 1j * pairs[..., 5:]) * np.exp(1j * angle)[:, :, None]
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    result = rotate(x, *rope_tables(jnp.asarray(positions), 10, theta))
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result[1], expected[1], atol=4e-3)  # float32 angles at position 4000
    np.testing.assert_array_equal(result[0, 0], x[0, 0])


def test_rope_products_depend_on_the_distance_only():
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def product(i, j):
        at = [rotate(x, *rope_tables(jnp.asarray([[p]]), 8, 1e4)) for x, p in ((query, i), (key, j))]
        return float(jnp.sum(at[0] * at[1]))

    assert product(7, 3) == pytest.approx(product(57, 53), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


def test_rope_and_rounding_in_one_kernel_give_the_rounded_keys_of_the_model():
    key, positions = random(2, 9, 3, 64, dtype=jnp.bfloat16), jnp.arange(18, dtype=jnp.int32).reshape(2, 9)
    fused = rope_fake_quant(key, *rope_tables(positions, 64, 1e4), NVFP4, np.float32(2.0**-9), implementation="pallas")
    rounded = fake_quant(rotate(key, *rope_tables(positions, 64, 1e4)), NVFP4, np.float32(2.0**-9))
    assert rounded.any()
    np.testing.assert_array_equal(fused.astype(jnp.float32), rounded.astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_equals_the_formula(dtype):
    x, weight = random(2, 3, 8, dtype=dtype), random(8, seed=3)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=1e-5 if dtype == jnp.float32 else 4e-3, atol=1e-6)
