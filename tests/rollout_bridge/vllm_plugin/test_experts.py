"""The emulated expert block against a plain loop over tokens in NumPy, with operands from the oracle."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle
from pallas_kernels import fake_quant as jax_fake_quant
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import BF16

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics, observing  # noqa: E402
from rollout_bridge.vllm_plugin.activations import Rounding  # noqa: E402
from rollout_bridge.vllm_plugin.experts import apply_experts  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import to_numpy, to_torch  # noqa: E402

TOKENS, EXPERTS, WIDTH, HIDDEN, CHOSEN = 9, 5, 48, 32, 2


def quantized(weight: np.ndarray):
    """(oracle, torch): stacked experts with a multiplier for each."""
    multiplier = oracle.decode_multiplier(np.abs(weight.astype(np.float32)).max(axis=(1, 2)))[:, None]
    return oracle.quantize(weight, NVFP4, multiplier), numerics.quantize(to_torch(weight), numerics.NVFP4, multiplier)


def rounded(values, multiplier, channels):
    """Q(x), plus Q of its residual at some channels: what the compensated product amounts to."""
    if multiplier is None:
        return values
    wide = oracle.fake_quant(values.astype(np.float32), NVFP4, multiplier).astype(np.float64)
    if channels is not None:
        left = (values.astype(np.float32) - wide.astype(np.float32))[..., channels]
        wide[..., channels] += oracle.fake_quant(left, NVFP4, multiplier / np.float32(4))
    return wide


@pytest.mark.parametrize("mode", ("W4A4", "W4A16", "compensated"))
def test_equals_a_loop_over_tokens(mode):
    rng = np.random.default_rng(3)
    x = cases.normal((TOKENS, WIDTH), 4, np.float32, spread=0.5)
    ids = np.stack([rng.permutation(EXPERTS - 1)[:CHOSEN] for _ in range(TOKENS)])  # the last expert has no token
    mixing = rng.random((TOKENS, CHOSEN)).astype(np.float32)
    gate_up, our_gate_up = quantized(cases.normal((EXPERTS, 2 * HIDDEN, WIDTH), 5, spread=0.0))
    down, our_down = quantized(cases.normal((EXPERTS, WIDTH, HIDDEN), 6, spread=0.0))
    multipliers = [np.float32(2.0**-8 * cases.NUDGE), np.float32(2.0**-4 * cases.NUDGE)] if mode != "W4A16" else [None, None]
    channels = [np.arange(0, WIDTH, 2)[:16], np.arange(HIDDEN)] if mode == "compensated" else [None, None]

    expected = np.zeros((TOKENS, WIDTH))
    wide, narrow = oracle.dequantize(gate_up, np.float64), oracle.dequantize(down, np.float64)
    for token in range(TOKENS):
        row = rounded(x[token], multipliers[0], channels[0]).astype(np.float64)
        for expert, weight in zip(ids[token], mixing[token], strict=True):
            gate, up = np.split(wide[expert] @ row, 2)
            hidden = rounded(gate / (1 + np.exp(-gate)) * up, multipliers[1], channels[1])
            expected[token] += weight * (narrow[expert] @ hidden.astype(np.float64))
    roundings = [
        Rounding() if value is None else Rounding(numerics.NVFP4, torch.tensor(value), None if some is None else torch.from_numpy(some))
        for value, some in zip(multipliers, channels, strict=True)
    ]
    out = apply_experts(torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(mixing), our_gate_up, our_down, *roundings)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_no_tokens_and_the_dtype_of_the_input():
    _, gate_up = quantized(cases.normal((EXPERTS, 2 * HIDDEN, WIDTH), 5, spread=0.0))
    _, down = quantized(cases.normal((EXPERTS, WIDTH, HIDDEN), 6, spread=0.0))
    for tokens in (0, 3):
        x = to_torch(cases.normal((tokens, WIDTH), 7, BF16))
        ids = torch.zeros(tokens, CHOSEN, dtype=torch.int32)
        out = apply_experts(x, ids, torch.ones(tokens, CHOSEN), gate_up, down)
        assert out.shape == (tokens, WIDTH) and out.dtype == torch.bfloat16


class Hooks(types.ModuleType):
    """A capture's hooks."""

    def __init__(self):
        super().__init__(observing.HOOKS)
        self.seen: list[tuple] = []
        self.on, self.instead = True, cast(Any, None)

    def active(self):
        return self.on

    def observe(self, *shown):
        self.seen.append(shown)
        return shown[2] if self.instead is None else self.instead


@pytest.mark.parametrize("channels", (None, torch.arange(16)), ids=("plain", "compensated"))
def test_a_capture_sees_the_codes_and_changes_nothing(monkeypatch, channels):
    x, multiplier = cases.normal((TOKENS, WIDTH), 8, BF16), np.float32(2.0**-8 * cases.NUDGE)
    rounding = Rounding(numerics.NVFP4, torch.tensor(multiplier), channels, site=("expert_input", 3))
    unseen = rounding.input(to_torch(x))
    hooks = Hooks()
    monkeypatch.setitem(sys.modules, observing.HOOKS, hooks)
    assert torch.equal(rounding.input(to_torch(x)), unseen)
    ((site, layer, q, shown),) = hooks.seen
    expected = oracle.quantize(x, NVFP4, multiplier)
    assert (site, layer) == ("expert_input", 3) and torch.equal(shown, to_torch(x))
    assert cases.mismatches(q.codes.numpy(), expected.codes) == 0 and cases.mismatches(q.scales.numpy(), expected.scales) == 0
    Rounding(numerics.NVFP4, torch.tensor(multiplier)).input(to_torch(x))  # a site that is not recorded
    hooks.instead = numerics.quantize(to_torch(-x), numerics.NVFP4, multiplier)  # a replay
    size = x.shape[-1]
    assert torch.equal(rounding.input(to_torch(x))[:, :size], rounding.input(to_torch(-x))[:, :size])
    assert not torch.equal(rounding.input(to_torch(x))[:, :size], unseen[:, :size])
    seen, hooks.on = len(hooks.seen), False
    rounding.input(to_torch(x))
    assert len(hooks.seen) == seen


def test_keys_and_values_under_a_plain_power_of_two_are_the_trainer_s():
    from trace_jax.quantization.multipliers import site_multiplier

    x = cases.normal((TOKENS, 2, 32), 9, BF16, spread=1.0)
    multiplier = site_multiplier("k", jnp.float32(np.abs(x.astype(np.float32)).max()))
    expected = jax_fake_quant(jnp.asarray(x), NVFP4, multiplier)
    found = Rounding(numerics.NVFP4, torch.tensor(np.asarray(multiplier))).input(to_torch(x))
    assert cases.mismatches(to_numpy(found), np.asarray(expected)) == 0
    clipped = Rounding(numerics.NVFP4, torch.tensor(np.asarray(multiplier) / np.float32(64))).input(to_torch(x))
    assert cases.mismatches(to_numpy(clipped), np.asarray(expected)) > 0


def test_layers_are_read_from_module_names():
    assert observing.layer_id("model.layers.11.mlp.experts") == 11 and observing.layer_id("model.layers.0.self_attn.attn") == 0


def test_energy_adds_up_over_calls():
    x, multiplier = cases.normal((TOKENS, WIDTH), 10, BF16), torch.tensor(2.0**-8)
    energy = torch.zeros(WIDTH, dtype=torch.float64)
    measuring = Rounding(numerics.NVFP4, multiplier, energy=energy)
    for rows in (x[:4], x[4:]):
        measuring.input(to_torch(rows))
    torch.testing.assert_close(energy, numerics.channel_energy(to_torch(x), numerics.NVFP4, multiplier))
