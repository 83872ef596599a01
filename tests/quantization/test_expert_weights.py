"""The one quantizer of expert weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, oracle, round_to_bf16
from trace_jax.layers.experts import ExpertWeights
from trace_jax.quantization.weights import expert_multipliers, fake_quant_experts, quantize_experts

E = 4


def masters(width=64, hidden=32, scale=0.05, seed=0):
    rng = np.random.default_rng(seed)
    gate, up = (jnp.asarray(rng.normal(size=(E, hidden, width)) * scale, jnp.float32) for _ in range(2))
    return ExpertWeights(gate, up * 7.0, jnp.asarray(rng.normal(size=(E, width, hidden)) * scale, jnp.float32))


def test_exp_02_gate_and_up_share_a_multiplier_also_for_a_dead_expert():
    weights = masters()
    weights = weights._replace(gate=weights.gate.at[1].set(0.0))
    weights = ExpertWeights(*(w.at[2].set(0.0) for w in weights))
    for multiplier in expert_multipliers(weights):
        assert multiplier.shape == (E,) and np.all(np.isfinite(multiplier)) and np.all(multiplier > 0)
    quantized = quantize_experts(weights, "nvfp4")
    np.testing.assert_array_equal(quantized["gate"].multiplier, quantized["up"].multiplier)
    assert not np.any(dequantize(quantized["up"], jnp.float32)[2])
    gate_up, _ = expert_multipliers(weights)
    assert gate_up[1] == expert_multipliers(weights._replace(gate=weights.up))[0][1]  # the up projection alone decides


def test_the_multiplier_is_that_of_the_larger_of_gate_and_up_per_expert():
    weights = masters()
    amax = np.maximum(*(np.abs(np.asarray(w)).max((1, 2)) for w in (weights.gate, weights.up)))
    np.testing.assert_array_equal(expert_multipliers(weights)[0], oracle.decode_multiplier(amax))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(64, 32), (17, 5)])
def test_exp_20_fake_quant_equals_the_decoded_export(fmt, shape):
    weights = masters(*shape)
    trained = fake_quant_experts(weights, fmt)
    jitted = jax.jit(fake_quant_experts, static_argnums=1)(weights, fmt)
    for name, quantized in quantize_experts(weights, fmt).items():
        exported = dequantize(quantized, jnp.float32)
        np.testing.assert_array_equal(getattr(trained, name), exported)
        np.testing.assert_array_equal(getattr(jitted, name), exported)
        np.testing.assert_array_equal(dequantize(quantized, jnp.bfloat16).astype(jnp.float32), exported)
        assert np.count_nonzero(exported) > 0.5 * exported.size


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_the_fp4_of_the_bf16_export_is_the_fp4_of_the_master(fmt):
    weights = masters()
    once = ExpertWeights(*(round_to_bf16(w) for w in weights))
    for name, quantized in quantize_experts(weights, fmt).items():
        again = quantize_experts(once, fmt)[name]
        np.testing.assert_array_equal(quantized.codes, again.codes)
        np.testing.assert_array_equal(quantized.scales, again.scales)


def test_exp_21_a_small_block_trains_as_it_is_exported():
    """A block with amax 3e-5 in an expert with amax 0.02 keeps its own scale on both paths."""
    weights = masters(scale=0.001)
    small = jnp.asarray(np.linspace(-3e-5, 3e-5, 16), jnp.float32)
    weights = weights._replace(down=weights.down.at[0, 0, :16].set(small).at[0, 1, 0].set(0.02))
    trained = fake_quant_experts(weights, "nvfp4").down[0, 0, :16]
    exported = dequantize(quantize_experts(weights, "nvfp4")["down"], jnp.float32)[0, 0, :16]
    np.testing.assert_array_equal(trained, exported)
    assert np.count_nonzero(exported) >= 10 and np.max(np.abs(exported - small)) < 1e-5


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4", "mxfp4"])
def test_the_gradient_reaches_the_float32_master_unchanged(fmt):
    weights = masters(40, 24)
    rng = np.random.default_rng(3)
    cotangent = ExpertWeights(*(jnp.asarray(rng.normal(size=w.shape), jnp.float32) for w in weights))
    rounded, pullback = jax.vjp(lambda w: fake_quant_experts(w, fmt), weights)
    (gradient,) = pullback(cotangent)
    for name in ExpertWeights._fields:
        assert getattr(rounded, name).dtype == jnp.float32
        np.testing.assert_array_equal(getattr(gradient, name), getattr(cotangent, name))


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
def test_rounded_weights_are_exact_in_bfloat16_and_differ_from_the_master(fmt):
    weights = masters()
    for rounded, master in zip(fake_quant_experts(weights, fmt), weights, strict=True):
        np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16).astype(jnp.float32))
        assert np.mean(np.asarray(rounded) != np.asarray(round_to_bf16(master))) > 0.5


def test_experts_are_quantized_independently_of_each_other():
    weights = masters()
    louder = ExpertWeights(*(w.at[0].mul(64.0) for w in weights))
    for before, after in zip(fake_quant_experts(weights, "nvfp4"), fake_quant_experts(louder, "nvfp4"), strict=True):
        np.testing.assert_array_equal(before[1:], after[1:])
        np.testing.assert_array_equal(before[0] * 64, after[0])
