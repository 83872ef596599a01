"""Every quantizer against the oracle on 10^8 values per format and dtype, divided into pieces; `gpu` and `slow`.

A piece holds as many normal and heavy-tailed values as values over the whole exponent range, and blocks that are subnormal throughout.
"""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import oracle
from tests.pallas_kernels import cases
from tests.pallas_kernels.base_guided import KINDS, GuidedBase, random_guide
from tests.pallas_kernels.base_quantize import QuantizeBase
from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, mismatches

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PIECES = 20
ROWS, SIZE = 1248, 4096  # 5.1 million values
MULTIPLIERS = (np.float32(2.0**-8), np.float32(2.0**-11 * NUDGE))
"""Of the trainer and of the rollout."""


class Sweep(QuantizeBase, GuidedBase):
    """The calls of one implementation."""

    def __init__(self, implementation: str):
        self.implementation = implementation


def values(piece: int, dtype) -> np.ndarray:
    """The values of a piece, [ROWS, SIZE]: normal, Student's t with two degrees of freedom, any exponent, subnormal."""
    rng = np.random.default_rng(piece)
    shape = (ROWS // 4, SIZE)
    heavy = rng.standard_t(2, size=shape).astype(np.float32)
    subnormal = rng.integers(-(2**23) + 1, 2**23, size=shape) * np.float32(2.0**-149)
    parts = (cases.normal(shape, piece, dtype), heavy.astype(dtype), cases.wild(shape, piece, dtype), subnormal.astype(dtype))
    return np.concatenate(parts)


@pytest.fixture
def implementations(require):
    require("triton")
    require("jax_triton")
    return tuple(Sweep(name) for name in ("reference", "pallas", "triton"))


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("dtype", (BF16, np.float32), ids=("bfloat16", "float32"))
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_hundred_million_values(fmt, dtype, piece, implementations):
    x = values(piece, dtype)
    own, rollout = MULTIPLIERS if fmt.has_multiplier else (None, None)
    expected = oracle.quantize(x, fmt, own)
    rounded = oracle.dequantize(expected, x.dtype)
    for each in implementations:
        q = each.quantize(x, fmt, own)
        assert mismatches(q.codes, expected.codes) == 0 and mismatches(q.scales, expected.scales) == 0, each.implementation
        assert mismatches(each.dequantize(q, x.dtype), rounded) == 0, each.implementation
        assert mismatches(each.fake_quant(x, fmt, own), rounded) == 0, each.implementation
    scales = oracle.quantize(x, fmt, rollout).scales
    for kind in KINDS:
        guide = random_guide(x, kind, fmt, piece, scales, rollout)
        with np.errstate(all="ignore"):
            guided = oracle.guided_fake_quant(x, guide, fmt, own)
        for each in implementations:
            assert mismatches(each.guided(x, guide, fmt, own), guided) == 0, (each.implementation, kind)
