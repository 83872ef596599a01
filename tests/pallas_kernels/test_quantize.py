"""`quantize`, `dequantize` and `fake_quant`: the shared tests for each implementation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, BlockFormat, Quantized, block_format, dequantize, fake_quant, quantize
from tests.pallas_kernels.base_quantize import FakeQuantTransformsBase, QuantizeBase
from tests.pallas_kernels.cases import normal


class TestReference(QuantizeBase, FakeQuantTransformsBase):
    implementation = "reference"


class TestPallasInterpreted(QuantizeBase, FakeQuantTransformsBase):
    implementation = "pallas"

    def test_no_rows_are_refused_with_a_reason(self):
        with pytest.raises(NotImplementedError, match="at least one row"):
            self.fake_quant(jnp.zeros((0, 32)), NVFP4)


def test_block_format_names_the_choices():
    assert block_format("nvfp4") is NVFP4 and block_format("mxfp4") is MXFP4
    with pytest.raises(ValueError, match="mxfp4, nvfp4"):
        block_format("int4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("short", 4, "e8m0", False), "multiple of 8"),
        (("odd", 20, "e4m3", True), "multiple of 8"),
        (("bare", 16, "e4m3", False), "under a multiplier"),
        (("both", 32, "e8m0", True), "under a multiplier"),
    ],
)
def test_impossible_formats_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"format '{arguments[0]}'.*{message}"):
        BlockFormat(*arguments)


def test_other_block_lengths():
    """bfloat16, where NVFP4 has rules of its own for its 16 values; blocks of 32 are in docs/kernels.md."""
    x, multiplier = normal((4, 100), 12), np.float32(2.0**-9)
    eight, long = BlockFormat("nvfp4_8", 8, "e4m3", True), BlockFormat("nvfp4_64", 64, "e4m3", True)
    TestPallasInterpreted().check(x, eight, multiplier)
    with pytest.raises(NotImplementedError, match="blocks of 8, 16, 32 values, not 64"):
        quantize(jnp.asarray(x), long, multiplier, implementation="pallas")
    TestReference().check(x, long, multiplier)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fake_quant(jnp.zeros((2, 32), jnp.int32), NVFP4), "int32"),
        (lambda: fake_quant(jnp.zeros(()), NVFP4), "last axis"),
        (lambda: fake_quant(jnp.zeros((2, 0)), NVFP4), "empty"),
        (lambda: fake_quant(jnp.zeros((2, 32)), MXFP4, jnp.float32(1)), "no multiplier"),
        (lambda: fake_quant(jnp.zeros((2, 32)), NVFP4, jnp.ones((3,))), "broadcast"),
        (lambda: fake_quant(jnp.zeros((2, 32)), NVFP4, jnp.ones((2, 1))), "broadcast"),
        (lambda: quantize(jnp.zeros((2, 32)), NVFP4, implementation="cuda"), "reference, pallas"),
        (lambda: dequantize(Quantized(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 1), jnp.uint8), None, 16, NVFP4)), "needs a multiplier"),
        (
            lambda: dequantize(Quantized(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 2), jnp.uint8), jnp.float32(1), 16, NVFP4)),
            "do not fit",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_quantized_is_a_pytree(key):
    import jax

    q = quantize(jax.random.normal(key, (3, 4, 32)), NVFP4)
    stacked = jax.tree.map(lambda leaf: leaf[None], q)
    assert stacked.fmt is NVFP4 and stacked.size == 32 and stacked.codes.shape == (1, 3, 4, 16)
    values = jax.vmap(lambda codes, scales: dequantize(Quantized(codes, scales, q.multiplier, 32, NVFP4)))(q.codes, q.scales)
    np.testing.assert_array_equal(np.asarray(values.astype(jnp.float32)), np.asarray(dequantize(q, jnp.float32)))
