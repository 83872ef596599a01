"""`rope_fake_quant`: the shared tests for each implementation, the tables, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, rope_fake_quant
from tests.pallas_kernels.base_rope import RopeBase, RopeSourceBase, tables, turns
from tests.pallas_kernels.cases import all_bf16, mismatches, normal


class TestReference(RopeBase):
    implementation = "reference"


class TestPallasInterpreted(RopeBase, RopeSourceBase):
    implementation = "pallas"


def test_tables_are_those_of_the_angles():
    positions = np.array([0, 1, 1000, 40000], np.int32)
    cos, sin = (np.asarray(each) for each in tables(jnp.asarray(positions), 128, 1e6))
    angle = positions[:, None] * 1e6 ** (-np.arange(64) / 64)
    # An angle is a float32 number: at 40000 it is off by up to 2^-9 and a few units of its frequency.
    for table, exact in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert table.dtype == np.float32 and np.abs(table - exact)[:3].max() < 1e-3 and np.abs(table - exact).max() < 2e-2
    assert (cos[0] == 1).all() and not sin[0].any()


def test_a_product_fused_with_the_sum_would_be_seen():
    """The control: one product that is not rounded before the sum changes results."""
    x, (cos, sin) = np.where(np.isfinite(all_bf16().astype(np.float32)), all_bf16(), 0).reshape(256, 4, 64), turns((256,), 64, 6)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(all="ignore"):
        rounded = (second * sin[:, None].astype(np.float64)).astype(np.float32).astype(np.float64)
        contracted = (first * cos[:, None].astype(np.float64) - rounded).astype(np.float32).astype(x.dtype)
    assert mismatches(contracted, oracle.rotate(x, cos, sin)[..., :32]) > 0


@pytest.mark.usefixtures("unchecked")
def test_refused():
    x, *tables = (jnp.asarray(each) for each in (normal((2, 3, 64), 1), *turns((2,), 64, 1)))
    cos, sin = tables
    with pytest.raises(ValueError, match="nvfp4 needs a multiplier"):
        rope_fake_quant(x, cos, sin, NVFP4, None)
    with pytest.raises(ValueError, match=r"do not turn heads \(2, 3, 64\); pass rope_tables"):
        rope_fake_quant(x, cos[:1], sin, MXFP4, None)
    with pytest.raises(NotImplementedError, match="take bfloat16, not float32"):
        rope_fake_quant(x.astype(jnp.float32), cos, sin, MXFP4, None, implementation="pallas")
    with pytest.raises(NotImplementedError, match="halves of 24 values are not whole blocks of 32"):
        rope_fake_quant(x[..., :48], cos[:, :24], sin[:, :24], MXFP4, None, implementation="pallas")
