"""The quantizers in another process, where `import jax` fails: the bytes come back the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels import oracle
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
out = {}
for fmt, m in ((numerics.NVFP4, multiplier), (numerics.MXFP4, None)):
    q = numerics.quantize(x, fmt, m)
    out |= {fmt.name + ".codes": q.codes.numpy(), fmt.name + ".scales": q.scales.numpy()}
    out[fmt.name + ".values"] = numerics.dequantize(q, torch.float32).numpy()
np.savez(sys.argv[2], **out)
"""


def test_the_same_bytes_without_jax(tmp_path: Path, environment: dict[str, str]):
    x, multiplier = cases.all_bf16(), np.float32(2.0**-3 * NUDGE)
    np.savez(tmp_path / "in.npz", bits=x.view(np.uint16), multiplier=multiplier)
    command = [sys.executable, "-c", WORKER, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as found:
        for fmt in FORMATS:
            expected = oracle.quantize(x, fmt, multiplier if fmt.has_multiplier else None)
            assert mismatches(found[f"{fmt.name}.codes"], expected.codes) == 0
            assert mismatches(found[f"{fmt.name}.scales"], expected.scales) == 0
            assert mismatches(found[f"{fmt.name}.values"], oracle.dequantize(expected, np.float32)) == 0
