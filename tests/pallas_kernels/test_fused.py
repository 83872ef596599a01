"""The fused roundings: the shared tests for each implementation, the sigmoid, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, rms_norm_fake_quant, swiglu_fake_quant
from pallas_kernels.groups import plan
from pallas_kernels.rms_norm_fake_quant import pallas as norm_kernel
from pallas_kernels.swiglu_fake_quant import rule
from tests.pallas_kernels.base_fused import EPS, RmsNormBase, SourcesBase, SwigluBase, inverse_rms, produced, states
from tests.pallas_kernels.cases import all_bf16, mismatches, normal


class TestReference(RmsNormBase, SwigluBase):
    implementation = "reference"


class TestPallasInterpreted(RmsNormBase, SwigluBase, SourcesBase):
    implementation = "pallas"


def test_sigmoid_is_one_everywhere():
    """Of all finite bfloat16 values, down to where it is zero."""
    x = all_bf16().astype(np.float32).reshape(-1)
    x = x[np.abs(x) <= rule.LOWEST]
    value, exact = oracle.sigmoid(x), 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.abs(value / exact - 1).max() < 2.0**-18.5
    assert oracle.sigmoid(np.array([-87, -np.inf], np.float32)).tolist() == [0, 0]
    # Compiled, XLA would take an integer added and taken away for nothing at all (`rule.sigmoid`).
    for compute in (rule.sigmoid, jax.jit(rule.sigmoid)):
        assert mismatches(compute(jnp.asarray(x)), value.astype(np.float32)) == 0


def test_products_in_another_order_are_seen(monkeypatch):
    """The control."""
    monkeypatch.setattr(norm_kernel, "scaled", lambda x, inverse, weight: x * (inverse * weight))
    x, weight = states(6)
    x, inverse = x[:5], np.asarray(inverse_rms(x[:5], EPS))
    assert (
        mismatches(produced(norm_kernel.normalized, plan(x.shape, NVFP4, None))(x, weight, inverse), oracle.rms_norm(x, weight, inverse))
        > 0
    )


@pytest.mark.usefixtures("unchecked")
def test_refused():
    x, weight, wide = jnp.asarray(normal((2, 32), 1)), jnp.ones(32), jnp.ones((2, 32), jnp.float32)
    with pytest.raises(ValueError, match="nvfp4 needs a multiplier"):
        rms_norm_fake_quant(x, weight, EPS, NVFP4, None)
    with pytest.raises(ValueError, match=r"weight has shape \(31,\); x needs \(32,\)"):
        rms_norm_fake_quant(x, weight[:31], EPS, MXFP4, None)
    with pytest.raises(NotImplementedError, match="take bfloat16, not float32"):
        rms_norm_fake_quant(wide, weight, EPS, MXFP4, None, implementation="pallas")
    with pytest.raises(ValueError, match="nvfp4 needs a multiplier"):
        swiglu_fake_quant(x, x, NVFP4, None)
    with pytest.raises(ValueError, match="takes bfloat16, got bfloat16 and float32"):
        swiglu_fake_quant(x, wide, MXFP4, None)
    with pytest.raises(ValueError, match="two projections of the same tokens"):
        swiglu_fake_quant(x, x[:1], MXFP4, None)
