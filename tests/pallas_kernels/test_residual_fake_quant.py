"""`residual_fake_quant`: the shared tests for each implementation, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, residual_fake_quant
from pallas_kernels.residual_fake_quant import pallas as kernel
from tests.pallas_kernels.base_residual import FREE, ResidualBase, activations
from tests.pallas_kernels.cases import mismatches, normal


class TestReference(ResidualBase):
    implementation = "reference"


class TestPallasInterpreted(ResidualBase):
    implementation = "pallas"


def test_the_tensor_s_own_multiplier_on_the_residual_is_seen(monkeypatch):
    """The control."""
    monkeypatch.setattr(kernel, "residual_multiplier", lambda multiplier: multiplier)
    x = normal((5, 104), 1)  # a shape of its own: what is compiled here must serve no other test
    first, second = kernel.residual_fake_quant(jnp.asarray(x), jnp.asarray(FREE), jnp.float32(2.0**-7), NVFP4)
    expected = oracle.residual_fake_quant(x, FREE, NVFP4, np.float32(2.0**-7))
    assert mismatches(first, expected[0]) == 0 and mismatches(second, expected[1]) > 0


@pytest.mark.usefixtures("unchecked")
def test_refused():
    x, free = jnp.asarray(activations(1)), jnp.asarray(FREE)
    with pytest.raises(ValueError, match="nvfp4 needs a multiplier"):
        residual_fake_quant(x, free, NVFP4, None)
    with pytest.raises(ValueError, match="no channels; call fake_quant"):
        residual_fake_quant(x, free[:0], MXFP4, None)
    with pytest.raises(NotImplementedError, match="take bfloat16, not float32"):
        residual_fake_quant(x.astype(jnp.float32), free, MXFP4, None, implementation="pallas")
    with pytest.raises(NotImplementedError, match="one of 65536 values is too long"):
        kernel.residual_fake_quant(jnp.zeros((1, 65536), x.dtype), jnp.asarray(FREE), jnp.float32(1), NVFP4, False)
