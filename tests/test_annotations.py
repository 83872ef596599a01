"""The shapes and dtypes in the signatures are checked at run time in every test (the import hook in conftest.py)."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from pallas_kernels import NVFP4, Quantized, fake_quant, quantize
from trace_jax.layers.norm import rms_norm


def test_a_wrong_shape_is_refused_in_both_packages():
    x = jnp.ones((2, 16))
    with pytest.raises(TypeCheckError, match="weight"):
        rms_norm(x, jnp.ones(15), 1e-6)
    with pytest.raises(TypeCheckError, match="multiplier"):
        fake_quant(x, NVFP4, jnp.ones(3))


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        fake_quant(jnp.ones((2, 16), jnp.int32), NVFP4)


@pytest.mark.usefixtures("unchecked")
def test_a_user_sees_the_function_s_own_error():
    with pytest.raises(ValueError, match="int32"):
        fake_quant(jnp.ones((2, 16), jnp.int32), NVFP4)


def test_fields_are_checked_when_made_and_not_when_jax_rebuilds():
    q = quantize(jnp.ones((2, 16)), NVFP4)
    with pytest.raises(TypeCheckError, match="scales"):
        Quantized(q.codes, q.scales[:1], q.multiplier, 16, NVFP4)
    shapes = jax.tree.map(lambda leaf: leaf.shape, q, is_leaf=lambda leaf: isinstance(leaf, jax.Array))
    assert (shapes.codes, shapes.scales, shapes.size, shapes.fmt) == ((2, 8), (2, 1), 16, NVFP4)
