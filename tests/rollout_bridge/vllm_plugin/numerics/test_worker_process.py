"""The quantizers in another process, where `import jax` fails: the bytes come back the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import FORMATS, NUDGE, mismatches

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

WORKER = """
import sys
for name in ("jax", "jaxlib", "jaxtyping", "ml_dtypes", "pallas_kernels", "trace_jax", "vllm"):
    sys.modules[name] = None  # importing it raises
import numpy as np, torch
import rollout_bridge.wire
import rollout_bridge.vllm_plugin.experts, rollout_bridge.vllm_plugin.plugin
from rollout_bridge.vllm_plugin import numerics
with np.load(sys.argv[1]) as file:
    x = torch.from_numpy(file["bits"].view(np.int16)).view(torch.bfloat16)
    multiplier = float(file["multiplier"])
    activations = torch.from_numpy(file["activations"].view(np.int16)).view(torch.bfloat16)
    channels = torch.from_numpy(file["channels"])
out = {}
for fmt, m in ((numerics.NVFP4, multiplier), (numerics.MXFP4, None)):
    q = numerics.quantize(x, fmt, m)
    out |= {fmt.name + ".codes": q.codes.numpy(), fmt.name + ".scales": q.scales.numpy()}
    out[fmt.name + ".values"] = numerics.dequantize(q, torch.float32).numpy()
for name, q in zip(("main", "residual"), numerics.residual_pair(activations, numerics.NVFP4, torch.tensor(multiplier), channels)):
    out |= {name + ".codes": q.codes.numpy(), name + ".scales": q.scales.numpy()}
np.savez(sys.argv[2], **out)
"""


def test_the_same_bytes_without_jax(tmp_path: Path, environment: dict[str, str]):
    x, multiplier = cases.all_bf16(), np.float32(2.0**-3 * NUDGE)
    activations, channels = cases.normal((16, 96), 31, cases.BF16, spread=0.5), np.arange(0, 96, 2)
    arrays = {"bits": x.view(np.uint16), "activations": activations.view(np.uint16), "channels": channels, "multiplier": multiplier}
    np.savez(tmp_path / "in.npz", **arrays)  # pyright: ignore[reportArgumentType]
    command = [sys.executable, "-c", WORKER, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as found:
        for fmt in FORMATS:
            expected = oracle.quantize(x, fmt, multiplier if fmt.has_multiplier else None)
            assert mismatches(found[f"{fmt.name}.codes"], expected.codes) == 0
            assert mismatches(found[f"{fmt.name}.scales"], expected.scales) == 0
            assert mismatches(found[f"{fmt.name}.values"], oracle.dequantize(expected, np.float32)) == 0
        wide = activations.astype(np.float32)
        left = (wide - oracle.fake_quant(activations, NVFP4, multiplier).astype(np.float32)).astype(cases.BF16)[:, channels]
        pair = {
            "main": oracle.quantize(activations, NVFP4, multiplier),
            "residual": oracle.quantize(left, NVFP4, multiplier / np.float32(4)),
        }
        for name, expected in pair.items():
            assert mismatches(found[f"{name}.codes"], expected.codes) == 0 and mismatches(found[f"{name}.scales"], expected.scales) == 0
        assert mismatches(found["residual.codes"], pair["main"].codes[:, :24]) > 0  # the control
