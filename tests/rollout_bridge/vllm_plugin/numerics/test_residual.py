"""QUADS' pair of quantized activations: the bytes of the oracle, and less error than the activation alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle, quantize
from pallas_kernels.residual_fake_quant.rule import residual, residual_multiplier
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, mismatches
from trace_jax.quantization.plan import SitePlan
from trace_jax.quantization.sites import round_site

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics import torch_cases  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import to_torch  # noqa: E402


def multiplier_of(x, fmt):
    return oracle.decode_multiplier(np.abs(x.astype(np.float32)).max()) if fmt.has_multiplier else None


def optional_tensor(multiplier):
    return None if multiplier is None else torch.tensor(multiplier)


@pytest.mark.parametrize("dtype", (BF16, np.float32, np.float16), ids=("bfloat16", "float32", "float16"))
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_both_operands_are_the_oracle_s(fmt, dtype):
    x = cases.normal((16, 96), 31, dtype, spread=0.5)
    multiplier = multiplier_of(x, fmt)
    channels = np.sort(np.random.default_rng(32).choice(96, size=45, replace=False))
    left = (x.astype(np.float32) - oracle.fake_quant(x, fmt, multiplier).astype(np.float32)).astype(dtype)[:, channels]
    expected = oracle.quantize(x, fmt, multiplier), oracle.quantize(left, fmt, None if multiplier is None else multiplier / np.float32(4))
    pair = numerics.residual_pair(to_torch(x), torch_cases.FORMATS[fmt], optional_tensor(multiplier), torch.from_numpy(channels))
    for ours, theirs in zip(pair, expected, strict=True):
        assert mismatches(ours.codes.numpy(), theirs.codes) == 0 and mismatches(ours.scales.numpy(), theirs.scales) == 0
        if ours.multiplier is not None and theirs.multiplier is not None:
            assert float(ours.multiplier) == float(theirs.multiplier)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_embedded_engine_rounds_to_the_same_bytes(fmt):
    """Codes, scales and values of both operands, with and without a capture."""
    x = cases.normal((16, 96), 37, BF16, spread=0.5)
    multiplier = multiplier_of(x, fmt)
    channels = np.sort(np.random.default_rng(38).choice(96, size=64, replace=False))
    pair = numerics.residual_pair(to_torch(x), torch_cases.FORMATS[fmt], optional_tensor(multiplier), torch.from_numpy(channels))
    values, scale, ids = jnp.asarray(x), None if multiplier is None else jnp.asarray(multiplier), jnp.asarray(channels, jnp.int32)
    plan = SitePlan(fmt.name)
    rounded, captured = round_site("expert_input", values, plan, scale, channels=ids, capture=True)
    assert captured is not None
    left = residual(values, rounded[:, :96])[:, ids]
    again = quantize(left, fmt, None if scale is None else residual_multiplier(scale))
    for ours, theirs in zip((captured, again), pair, strict=True):
        assert mismatches(np.asarray(ours.codes), theirs.codes.numpy()) == 0
        assert mismatches(np.asarray(ours.scales), theirs.scales.numpy()) == 0
    wide = torch.cat([numerics.dequantize(q, torch.float32) for q in pair], dim=-1).numpy()
    for found in (rounded, round_site("expert_input", values, plan, scale, channels=ids)[0]):
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), wide)


def test_residuals_of_bfloat16_are_exact():
    """Every finite bfloat16 under the power of two: x = Q(x) + R without rounding, so nothing is lost in between."""
    x = cases.all_bf16().astype(np.float32)
    x = np.where((np.abs(x) < 2.0**10) & (np.abs(x) > 2.0**-20), x, 0.0).astype(BF16)
    q = numerics.quantize(to_torch(x), numerics.NVFP4)
    left = numerics.residual(to_torch(x), q)
    total = numerics.dequantize(q, torch.float64) + left.to(torch.float64)
    np.testing.assert_array_equal(total.numpy(), x.astype(np.float64))


def test_the_residual_s_multiplier_fits_the_largest_residual():
    """Midpoint of the widest gap at the largest scale: the next smaller multiplier would clip it."""
    x = np.zeros((1, 16), BF16)
    x[0, :2] = 6 * 448, 5 * 448
    _, second = numerics.residual_pair(to_torch(x), numerics.NVFP4, torch.tensor(NUDGE, dtype=torch.float32), torch.arange(16))
    assert int(second.scales.max()) < 0x7E and abs(float(numerics.dequantize(second)[0, 1]) - 448) < 448 / 16
    smaller = numerics.quantize(
        numerics.residual(to_torch(x), numerics.quantize(to_torch(x), numerics.NVFP4, NUDGE)), numerics.NVFP4, NUDGE / 8
    )
    assert int(smaller.scales.max()) == 0x7E and float(numerics.dequantize(smaller)[0, 1]) < 0.8 * 448
    assert float(numerics.residual_multiplier(torch.tensor(2.0**-126))) == 2.0**-126


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_compensation_lowers_the_error_of_the_product_with_the_share_of_channels(fmt):
    x, weight = cases.normal((64, 128), 33, spread=0.5), cases.normal((32, 128), 34, spread=0.0)
    mine, multiplier = torch_cases.FORMATS[fmt], optional_tensor(multiplier_of(x, fmt))
    rounded = numerics.fake_quant(to_torch(weight), mine).to(torch.float32)
    exact = to_torch(x).to(torch.float32) @ rounded.T
    energy = numerics.channel_energy(to_torch(x), mine, multiplier)
    errors = []
    for fraction in (0.0, 0.25, 0.5, 1.0):
        channels = numerics.largest_channels(energy, fraction, mine)
        assert channels.numel() == fraction * 128
        pair = numerics.residual_pair(to_torch(x), mine, multiplier, channels) if channels.numel() else None
        product = (
            numerics.compensated_product(pair, rounded, channels)
            if pair
            else numerics.fake_quant(to_torch(x), mine, multiplier).to(torch.float32) @ rounded.T
        )
        errors.append(float((product - exact).norm()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.2 * errors[0] and errors[2] < 0.85 * errors[0]


def test_the_largest_channels_are_chosen_in_whole_blocks_and_in_order():
    energy = torch.zeros(64, dtype=torch.float64)
    energy[40:] = 1.0
    energy[[3, 63]] = 5.0
    assert numerics.largest_channels(energy, 0.25, numerics.NVFP4).tolist() == [3, *range(40, 54), 63]
    assert numerics.largest_channels(energy, 0.01, numerics.NVFP4).tolist() == [3, *range(40, 54), 63]
    assert numerics.largest_channels(energy, 1.0, numerics.NVFP4).tolist() == list(range(64))
    assert numerics.largest_channels(energy, 0.0, numerics.NVFP4).tolist() == []
    assert len(numerics.largest_channels(torch.zeros(1600), 0.07, numerics.NVFP4)) == 112  # not 112.00000000000001, rounded up
    with pytest.raises(ValueError, match="from 0 to 1"):
        numerics.largest_channels(energy, 1.5, numerics.NVFP4)


def test_energy_is_the_squared_residual_of_each_channel():
    x = cases.normal((3, 5, 40), 36)
    multiplier = multiplier_of(x, NVFP4)
    left = x.astype(np.float64) - oracle.fake_quant(x, NVFP4, multiplier).astype(np.float64)
    found = numerics.channel_energy(to_torch(x), numerics.NVFP4, optional_tensor(multiplier))
    np.testing.assert_allclose(found.numpy(), (left**2).sum(axis=(0, 1)), rtol=1e-12)


def test_a_token_does_not_depend_on_its_neighbours():
    x = cases.normal((8, 64), 35)
    channels, multiplier = torch.arange(0, 64, 2), optional_tensor(multiplier_of(x, NVFP4))
    together = numerics.residual_pair(to_torch(x), numerics.NVFP4, multiplier, channels)
    alone = numerics.residual_pair(to_torch(x[3:4]), numerics.NVFP4, multiplier, channels)
    for one, all_ in zip(alone, together, strict=True):
        assert torch.equal(one.codes[0], all_.codes[3]) and torch.equal(one.scales[0], all_.scales[3])
    with pytest.raises(ValueError, match="static multiplier"):
        numerics.residual_pair(to_torch(x), numerics.NVFP4, None, channels)
