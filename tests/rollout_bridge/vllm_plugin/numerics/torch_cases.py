"""NumPy arrays to torch tensors and back, and the comparison with the NumPy oracle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle
from tests.pallas_kernels.cases import mismatches

torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402

FORMATS = {NVFP4: numerics.NVFP4, MXFP4: numerics.MXFP4}
"""The kernels' formats -> the worker's."""


def to_torch(x: np.ndarray) -> Any:
    """The same bits; bfloat16 travels as int16."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_numpy(x: Any) -> np.ndarray:
    """The same bits."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def differences(x: np.ndarray, fmt, multiplier=None) -> dict[str, int]:
    """How many elements differ from the oracle: codes, scales, multiplier, dequantized and fake-quantized values."""
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN bit patterns, and values that float16 does not reach
        expected = oracle.quantize(x, fmt, multiplier)
        values = oracle.dequantize(expected, x.dtype)
    mine = FORMATS[fmt]
    q = numerics.quantize(to_torch(x), mine, multiplier)
    found = {
        "codes": mismatches(q.codes.numpy(), expected.codes),
        "scales": mismatches(q.scales.numpy(), expected.scales),
        "values": mismatches(to_numpy(numerics.dequantize(q, to_torch(x).dtype)), values),
        "fake_quant": mismatches(to_numpy(numerics.fake_quant(to_torch(x), mine, multiplier)), values),
    }
    if fmt.has_multiplier:
        assert q.multiplier is not None and expected.multiplier is not None
        found["multiplier"] = mismatches(
            np.broadcast_to(q.multiplier.numpy(), x.shape[:-1]), np.broadcast_to(expected.multiplier, x.shape[:-1])
        )
    return found
