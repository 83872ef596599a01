"""Four-over-six against NumPy: codes, scales, the choice, and what it gains."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import NVFP4, Quantized, decode_multiplier, dequantize, oracle, quantize
from pallas_kernels.four_over_six import fake_quant_four_over_six, quantize_four_over_six, room


def weights(seed: int, rows: int = 64, width: int = 80) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_t(4, (rows, width)) * np.exp2(rng.integers(-12, 4, (rows, 1)))
    x[0] = 0.0
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_codes_and_scales_are_those_of_the_oracle(seed):
    x = weights(seed, rows=512)
    multiplier = decode_multiplier(room(jnp.asarray(np.abs(x).max(1))))
    codes, scales = jax.jit(quantize_four_over_six)(x, multiplier)
    expected = oracle.quantize_four_over_six(x, np.asarray(multiplier))
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(scales, expected.scales)
    # Both candidates are taken often; where 6 is, all is as in plain NVFP4.
    plain = oracle.quantize(x, NVFP4, np.asarray(multiplier))
    sixes = expected.scales == plain.scales
    assert 0.2 < sixes.mean() < 0.9 and (unpacked(expected.codes)[sixes] == unpacked(plain.codes)[sixes]).all()


def unpacked(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1, 16)


def test_a_block_of_fives_beside_a_six_is_kept_better_on_the_grid_to_four():
    x = jnp.asarray([[6.0, *[5.0] * 15]])
    values = fake_quant_four_over_six(x, decode_multiplier(room(jnp.asarray([6.0]))))
    np.testing.assert_allclose(values, [[6.0, *[4.5] * 15]], rtol=1e-4)  # 4 and 3 times 1.5, where plain NVFP4 makes 6 or 4 of a five


def test_error_is_below_that_of_rounding_to_nearest():
    x = jnp.asarray(weights(7, 256, 256))
    amax = jnp.max(jnp.abs(x), axis=1)
    better = fake_quant_four_over_six(x, decode_multiplier(room(amax)))
    plain = dequantize(quantize(x, NVFP4, decode_multiplier(amax)), jnp.float32)
    error, reference = (float(jnp.sum(((values - x) / (amax[:, None] + 1e-9)) ** 2)) for values in (better, plain))
    assert 0.6 * reference < error < 0.97 * reference


def test_decodes_like_plain_nvfp4_and_passes_the_gradient():
    x = jnp.asarray(weights(3))
    multiplier = decode_multiplier(room(jnp.max(jnp.abs(x), axis=1)))
    codes, scales = quantize_four_over_six(x, multiplier)
    stored = Quantized(codes, scales, multiplier, size=x.shape[-1], fmt=NVFP4)
    np.testing.assert_array_equal(dequantize(stored, jnp.float32), fake_quant_four_over_six(x, multiplier))
    cotangent = jnp.asarray(weights(4))
    gradient = jax.grad(lambda x: jnp.sum(fake_quant_four_over_six(x, multiplier) * cotangent))(x)
    np.testing.assert_array_equal(gradient, cotangent)


def test_a_block_that_is_not_finite_becomes_nan():
    x = jnp.asarray(weights(5)).at[3, 20].set(jnp.inf)
    values = fake_quant_four_over_six(x, decode_multiplier(room(jnp.max(jnp.abs(jnp.where(jnp.isfinite(x), x, 0)), axis=1))))
    assert bool(jnp.isnan(values[3, 16:32]).all()) and int(jnp.isnan(values).sum()) == 16
