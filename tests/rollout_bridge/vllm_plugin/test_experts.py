"""The emulated expert block against a plain loop over tokens in NumPy, with operands from the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import BF16

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402
from rollout_bridge.vllm_plugin.experts import apply_experts  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import to_torch  # noqa: E402

TOKENS, EXPERTS, WIDTH, HIDDEN, CHOSEN = 9, 5, 48, 32, 2


def quantized(weight: np.ndarray):
    """(oracle, torch): stacked experts with a multiplier for each."""
    multiplier = oracle.decode_multiplier(np.abs(weight.astype(np.float32)).max(axis=(1, 2)))[:, None]
    return oracle.quantize(weight, NVFP4, multiplier), numerics.quantize(to_torch(weight), numerics.NVFP4, multiplier)


@pytest.mark.parametrize("activations", (True, False), ids=("W4A4", "W4A16"))
def test_equals_a_loop_over_tokens(activations):
    rng = np.random.default_rng(3)
    x = cases.normal((TOKENS, WIDTH), 4, np.float32, spread=0.5)
    ids = np.stack([rng.permutation(EXPERTS - 1)[:CHOSEN] for _ in range(TOKENS)])  # the last expert has no token
    mixing = rng.random((TOKENS, CHOSEN)).astype(np.float32)
    gate_up, our_gate_up = quantized(cases.normal((EXPERTS, 2 * HIDDEN, WIDTH), 5, spread=0.0))
    down, our_down = quantized(cases.normal((EXPERTS, WIDTH, HIDDEN), 6, spread=0.0))
    multipliers = [np.float32(2.0**-8 * cases.NUDGE), np.float32(2.0**-4 * cases.NUDGE)] if activations else [None, None]

    def rounded(values, multiplier):
        return values if multiplier is None else oracle.fake_quant(values.astype(np.float32), NVFP4, multiplier)

    expected = np.zeros((TOKENS, WIDTH))
    wide, narrow = oracle.dequantize(gate_up, np.float64), oracle.dequantize(down, np.float64)
    for token in range(TOKENS):
        row = rounded(x[token], multipliers[0]).astype(np.float64)
        for expert, weight in zip(ids[token], mixing[token], strict=True):
            gate, up = np.split(wide[expert] @ row, 2)
            hidden = rounded(gate / (1 + np.exp(-gate)) * up, multipliers[1])
            expected[token] += weight * (narrow[expert] @ hidden.astype(np.float64))
    scalars = [None if value is None else torch.tensor(value) for value in multipliers]
    out = apply_experts(torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(mixing), our_gate_up, our_down, *scalars)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_no_tokens_and_the_dtype_of_the_input():
    _, gate_up = quantized(cases.normal((EXPERTS, 2 * HIDDEN, WIDTH), 5, spread=0.0))
    _, down = quantized(cases.normal((EXPERTS, WIDTH, HIDDEN), 6, spread=0.0))
    for tokens in (0, 3):
        x = to_torch(cases.normal((tokens, WIDTH), 7, BF16))
        ids = torch.zeros(tokens, CHOSEN, dtype=torch.int32)
        out = apply_experts(x, ids, torch.ones(tokens, CHOSEN), gate_up, down, None, None)
        assert out.shape == (tokens, WIDTH) and out.dtype == torch.bfloat16
