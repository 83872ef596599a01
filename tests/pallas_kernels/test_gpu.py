"""The shared tests once more on a GPU: the jnp reference compiled by XLA, the compiled Pallas kernels and the Triton kernels.

CPU cannot show what a GPU compiler folds, contracts or flushes, so every comparison with the oracle is repeated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, fake_quant
from tests.pallas_kernels import cases
from tests.pallas_kernels.base_fused import RmsNormBase, SourcesBase, SwigluBase
from tests.pallas_kernels.base_guided import KINDS, GuidedBase, random_guide
from tests.pallas_kernels.base_quantize import FakeQuantTransformsBase, QuantizeBase
from tests.pallas_kernels.base_residual import ResidualBase
from tests.pallas_kernels.base_rope import RopeBase, RopeSourceBase
from tests.pallas_kernels.cases import mismatches, normal

pytestmark = pytest.mark.gpu


class TestReferenceOnGpu(QuantizeBase, FakeQuantTransformsBase, GuidedBase, RmsNormBase, SwigluBase, RopeBase, ResidualBase):
    implementation = "reference"


class TestPallasOnGpu(
    QuantizeBase, FakeQuantTransformsBase, GuidedBase, RmsNormBase, SwigluBase, SourcesBase, RopeBase, RopeSourceBase, ResidualBase
):
    implementation = "pallas"


class TestTritonOnGpu(QuantizeBase, FakeQuantTransformsBase, GuidedBase):
    implementation = "triton"

    @pytest.fixture(autouse=True)
    def installed(self, require):
        require("triton")
        require("jax_triton")

    @pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", (np.float32, cases.BF16), ids=("float32", "bfloat16"))
    @pytest.mark.parametrize("fmt", cases.FORMATS, ids=lambda fmt: fmt.name)
    def test_every_kind_of_record_in_every_shape(self, fmt, dtype, shape):
        """Threads that exchanged entries of rows without whole blocks gave codes records of float32 other neighbours (Triton 3.6)."""
        rollout = np.float32(2.0**-6) if fmt.has_multiplier else None
        for seed in range(4):
            x = cases.normal(shape, seed, dtype)
            for kind in KINDS if x.size else ():
                self.check_guided(x, random_guide(x, kind, fmt, seed, multiplier=rollout), fmt, None)


def test_the_default_on_a_gpu_is_the_kernel():
    x = jnp.asarray(normal((64, 96), 1))
    text = jax.jit(lambda x: fake_quant(x, NVFP4)).lower(x).as_text()
    assert "triton" in text
    assert mismatches(fake_quant(x, NVFP4), fake_quant(x, NVFP4, implementation="reference")) == 0
