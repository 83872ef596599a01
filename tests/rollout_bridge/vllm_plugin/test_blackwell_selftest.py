"""The parts of the Blackwell self-test that run without one: the scale order of its kernels, and a comparison that sees differences."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_scaled_matmul import layout

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import blackwell_selftest  # noqa: E402
from rollout_bridge.vllm_plugin.numerics import NVFP4, quantize  # noqa: E402
from rollout_bridge.vllm_plugin.numerics.swizzle import swizzle_scales, unswizzle_scales  # noqa: E402


def test_a_recorded_tile():
    """Offsets that the PTX manual gives for the scale factors of a 128 x 4 tile."""
    scales = torch.arange(512, dtype=torch.int32).reshape(128, 4)
    tile = swizzle_scales(scales).flatten()
    for row, block, offset in ((0, 0, 0), (0, 3, 3), (32, 0, 4), (96, 3, 15), (1, 0, 16), (31, 2, 498), (127, 3, 511)):
        assert int(tile[offset]) == 4 * row + block


@pytest.mark.parametrize("shape", [(128, 4), (130, 5), (1, 1), (256, 12)])
def test_the_order_is_that_of_the_kernels_and_comes_back(shape):
    scales = np.random.default_rng(0).integers(0, 127, shape).astype(np.uint8)
    swizzled = swizzle_scales(torch.from_numpy(scales))
    rows, blocks = shape
    padded = np.pad(scales, ((0, -rows % 128), (0, -blocks % 4)))
    np.testing.assert_array_equal(swizzled.numpy(), np.asarray(layout.swizzle_scales(jnp.asarray(padded))))
    np.testing.assert_array_equal(unswizzle_scales(swizzled, rows, blocks).numpy(), scales)
    with pytest.raises(ValueError, match="rows of"):
        unswizzle_scales(swizzled.flatten()[1:], rows, blocks)


@pytest.mark.parametrize("nudged", [True, False])
def test_the_comparison_counts_what_differs(nudged: bool):
    def native(x, gain):
        q = quantize(x, NVFP4, 1 / gain)
        codes, scales = q.codes.clone(), q.scales.clone()
        codes[3, 5] ^= 0x21  # two values of one block
        codes[(codes & 15) == 0] |= 8  # -0, as native kernels leave it
        scales[7, 1] ^= 1
        return codes, swizzle_scales(scales)

    for x in blackwell_selftest.inputs(40, 96, torch.device("cpu")).values():
        found = blackwell_selftest.compare(native, x, nudged)
        assert found == {"values": 40 * 96, "codes_differ": 2, "codes_differ_under_equal_scales": 2, "scales_differ": 1}


def test_without_such_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["blackwell_selftest"])
    assert blackwell_selftest.main() == 2 and "compute capability 10.0" in capsys.readouterr().err
