"""Every Pallas body lowers for an NVIDIA GPU, checked without one (the Triton compiler itself does not run here)."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dequantize.pallas import dequantize
from pallas_kernels.fake_quant.pallas import fake_quant
from pallas_kernels.guided_fake_quant.pallas import guided_fake_quant
from pallas_kernels.quantize.pallas import quantize
from pallas_kernels.residual_fake_quant.pallas import residual_fake_quant
from pallas_kernels.rms_norm_fake_quant.pallas import rms_norm_fake_quant
from pallas_kernels.rope_fake_quant.pallas import rope_fake_quant
from pallas_kernels.swiglu_fake_quant.pallas import swiglu_fake_quant
from tests.pallas_kernels.cases import FORMATS

Shape = jax.ShapeDtypeStruct
DTYPES = (jnp.bfloat16, jnp.float32, jnp.float16)


def described_gpu():
    """From jax 0.11 on the lowering asks for the device it lowers for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def lowered(function, *arguments) -> str:
    with described_gpu():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def multipliers(fmt, rows):
    """None for MXFP4; a scalar and a per-row multiplier for NVFP4."""
    return (Shape((), jnp.float32), Shape(rows, jnp.float32)) if fmt.has_multiplier else (None,)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("shape", ((64, 96), (3, 5, 50)), ids=str)
def test_quantizers_lower_for_cuda(fmt, dtype, shape):
    x, rows, size = Shape(shape, dtype), shape[:-1], shape[-1]
    codes = Shape((*rows, fmt.codes_bytes(size)), jnp.uint8)
    scales = Shape((*rows, fmt.scales_bytes(size)), jnp.uint8)
    for m in multipliers(fmt, rows):
        assert "triton" in lowered(lambda x, m: quantize(x, m, fmt, interpret=False), x, m)
        assert "triton" in lowered(lambda x, m: fake_quant(x, m, fmt, interpret=False), x, m)
        assert "triton" in lowered(lambda c, s, m: dequantize(c, s, m, size, fmt, jnp.dtype(dtype), interpret=False), codes, scales, m)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("kind", "per_byte"), (("scales", None), ("mantissa", 8), ("codes", 2)))
def test_guided_rounding_lowers_for_cuda(fmt, kind, per_byte):
    rows, size = (3, 5), 50
    x = Shape((*rows, size), jnp.bfloat16)
    data = None if per_byte is None else Shape((*rows, -(-size // per_byte)), jnp.uint8)
    scales = Shape((*rows, fmt.scales_bytes(size)), jnp.uint8)
    for m in multipliers(fmt, rows):
        text = lowered(
            lambda x, d, s, v, m: guided_fake_quant(x, d, s, v, m, m, kind, fmt, interpret=False),
            *(x, data, scales, Shape(rows, jnp.bool_), m),
        )
        assert "triton" in text


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_fused_rounding_lowers_for_cuda(fmt):
    rows, size = (3, 5), 50
    x, weight, inverse = Shape((*rows, size), jnp.bfloat16), Shape((size,), jnp.float32), Shape((*rows, 1), jnp.float32)
    record = Shape((*rows, -(-size // 8)), jnp.uint8), Shape((*rows, fmt.scales_bytes(size)), jnp.uint8), Shape(rows, jnp.bool_)
    for m in multipliers(fmt, rows):
        assert "triton" in lowered(lambda x, m: swiglu_fake_quant(x, x, m, fmt, interpret=False), x, m)
        for kind, rounding in ((None, (m,)), ("mantissa", (*record, m, m))):
            text = lowered(
                lambda x, w, i, r, kind=kind: rms_norm_fake_quant(x, w, i, r, kind, fmt, interpret=False), x, weight, inverse, rounding
            )
            assert "triton" in text


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_rotation_lowers_for_cuda(fmt):
    rows, size = (3, 5, 2), 64
    x, table = Shape((*rows, size), jnp.bfloat16), Shape((*rows[:-1], size // 2), jnp.float32)
    record = Shape((*rows, size // 8), jnp.uint8), Shape((*rows, fmt.scales_bytes(size)), jnp.uint8), Shape(rows, jnp.bool_)
    m = multipliers(fmt, rows)[-1]
    for kind, rounding in ((None, (m,)), ("mantissa", (*record, m, m))):
        text = lowered(lambda x, c, s, r, kind=kind: rope_fake_quant(x, c, s, r, kind, fmt, interpret=False), x, table, table, rounding)
        assert "triton" in text


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_residual_rounding_lowers_for_cuda(fmt):
    rows, size = (3, 5), 104
    x, channels = Shape((*rows, size), jnp.bfloat16), Shape((45,), jnp.int32)
    for m in multipliers(fmt, rows):
        assert "triton" in lowered(lambda x, c, m: residual_fake_quant(x, c, m, fmt, interpret=False), x, channels, m)
