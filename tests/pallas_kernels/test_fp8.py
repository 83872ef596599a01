"""`fake_quant_fp8` against the NumPy oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fake_quant_fp8, oracle
from tests.pallas_kernels.cases import BF16, all_bf16, mismatches, normal, producer, wild


@pytest.mark.parametrize("block", (128, 32, None))
@pytest.mark.parametrize("x", (all_bf16(), wild((64, 200), 1), normal((64, 200), 2)), ids=("every_bf16", "wild", "normal"))
def test_equals_oracle(x, block):
    expected = oracle.fake_quant_fp8(x, block=block)
    assert mismatches(fake_quant_fp8(jnp.asarray(x), block=block), expected) == 0
    assert mismatches(jax.jit(lambda x: fake_quant_fp8(x, block=block))(x), expected) == 0


def test_a_fused_producer_changes_no_value():
    a, b = (normal((64, 512), seed, BF16) for seed in (1, 2))
    expected = oracle.fake_quant_fp8(np.asarray(jax.jit(producer)(a, b)))
    assert mismatches(jax.jit(lambda a, b: fake_quant_fp8(producer(a, b)))(a, b), expected) == 0


def test_values_are_e4m3_times_a_power_of_two():
    x = normal((4, 128), 3, np.float32)
    out = np.asarray(fake_quant_fp8(jnp.asarray(x)))
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 448))
    import ml_dtypes

    np.testing.assert_array_equal((out / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale, out)
    assert np.abs(out - x).max() <= (np.abs(x) / 16 + scale * 2.0**-10).max()


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_gradient_is_the_identity(dtype):
    x = jnp.asarray(normal((4, 50), 1, np.float32)).astype(dtype)
    weights = (x * jnp.asarray(1e-4, dtype)).astype(dtype)
    gradient = jax.grad(lambda x: jnp.sum((fake_quant_fp8(x) * weights).astype(jnp.float32)))(x)
    assert gradient.dtype == dtype and mismatches(gradient, weights) == 0


def test_wrong_block_is_explained():
    with pytest.raises(ValueError, match="block is 0"):
        fake_quant_fp8(jnp.zeros((2, 4)), block=0)
