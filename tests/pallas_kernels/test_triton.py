"""The Triton kernels against the NumPy oracle, bit for bit, in Triton's interpreter on CPU. On a GPU `test_gpu` runs all shared tests."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, Guide, fake_quant, guided_fake_quant, oracle, quantize
from tests.pallas_kernels import cases
from tests.pallas_kernels.base_guided import KINDS, GuidedBase, random_guide
from tests.pallas_kernels.base_quantize import QuantizeBase
from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, mismatches

triton = pytest.importorskip("triton")
from pallas_kernels.triton_kernels import reciprocal  # noqa: E402
from tests.pallas_kernels.triton_interpreter import interpreted, offsets_of_program  # noqa: E402, F401

pytestmark = [
    pytest.mark.triton,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter; on a GPU test_gpu compares the kernels"
    ),
]


class Quantizers(QuantizeBase):
    implementation = "triton"


class Guided(GuidedBase):
    implementation = "triton"


def row_multipliers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return (2.0 ** np.random.default_rng(seed).integers(-126, 118, size=shape)).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_quantizers_of_every_bf16_pattern(fmt):
    """NaN, infinities and subnormals included, under a multiplier for each row."""
    x = cases.all_bf16()
    Quantizers().check(x, fmt, row_multipliers(x.shape[:1], 1) if fmt.has_multiplier else None)


@pytest.mark.parametrize(("fmt", "dtype", "size"), ((NVFP4, BF16, 47), (MXFP4, BF16, 33), (NVFP4, np.float16, 96), (MXFP4, np.float32, 47)))
def test_quantizers_of_other_dtypes_and_sizes(fmt, dtype, size):
    """Normal, heavy-tailed and, but for float16, subnormal blocks; sizes that end within a block, a byte and an access."""
    x = np.concatenate([cases.normal((3, 5, size), size, dtype), cases.wild((2, 5, size), 7, dtype)])
    Quantizers().check(x, fmt, np.float32(2.0**-6 * NUDGE) if fmt.has_multiplier else None)


def test_every_threshold_at_every_scale_and_golden_vectors():
    Quantizers().test_every_threshold_at_every_scale()
    Quantizers().test_golden_vectors()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_scale_byte_and_code_decodes(fmt):
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.broadcast_to(oracle.pack_codes(np.arange(fmt.block, dtype=np.uint8) % 16), (256, fmt.block // 2))
    q = oracle.Quantized(codes, scales, row_multipliers((256,), 2) if fmt.has_multiplier else None, fmt.block, fmt)
    with np.errstate(all="ignore"):
        expected = oracle.dequantize(q)
    assert mismatches(Quantizers().dequantize(jax.tree.map(jnp.asarray, q)), expected) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_guided_rounding_of_every_bf16_pattern(fmt, kind):
    """Arbitrary records and scale bytes, rows without a record, multipliers of both sides for each row."""
    x = cases.all_bf16()
    own, rollout = (row_multipliers(x.shape[:1], seed) if fmt.has_multiplier else None for seed in (3, 4))
    Guided().check_guided(x, random_guide(x, kind, fmt, 5, multiplier=rollout), fmt, own)


@pytest.mark.parametrize(("fmt", "kind"), ((NVFP4, "mantissa"), (MXFP4, "codes")))
def test_guided_rounding_of_float32(fmt, kind):
    """Magnitudes on and beside every threshold at every scale, and a size that ends within a block."""
    x = np.ascontiguousarray(cases.ladder()[0].reshape(126, 32)[:, :-3])
    multiplier = np.float32(1.0) if fmt.has_multiplier else None
    scales = oracle.quantize(x, fmt, multiplier).scales
    Guided().check_guided(x, random_guide(x, kind, fmt, 6, scales), fmt, multiplier)


def test_vmap_is_one_more_axis_of_rows():
    x = jnp.asarray(cases.normal((3, 4, 48), 2))
    multipliers = jnp.asarray([0.25, 0.5, 2.0**-9 * NUDGE], jnp.float32)
    out = jax.vmap(lambda x, m: fake_quant(x, NVFP4, m, implementation="triton"))(x, multipliers)
    assert mismatches(out, oracle.fake_quant(np.asarray(x), NVFP4, np.asarray(multipliers)[:, None])) == 0

    guide = random_guide(x, "mantissa", NVFP4, 3)

    def one(x, data, scales):
        piece = Guide("mantissa", data, scales, None, jnp.asarray(guide.valid[0]))
        return guided_fake_quant(x, piece, NVFP4, jnp.float32(0.5), implementation="triton")

    whole = Guide("mantissa", guide.data, guide.scales, None, np.broadcast_to(guide.valid[0], (3, 4)))
    with np.errstate(all="ignore"):
        expected = oracle.guided_fake_quant(np.asarray(x), whole, NVFP4, np.float32(0.5))
    assert mismatches(jax.vmap(one)(x, jnp.asarray(guide.data), jnp.asarray(guide.scales)), expected) == 0


def test_ties_moved_to_the_wrong_side_are_seen(monkeypatch):
    """The control: ties then go to the larger code."""
    monkeypatch.setattr(reciprocal, "SLACK", triton.language.constexpr(-(1 << 11)))
    x = ((cases.normal((7, 64), 12, np.float32, spread=0) * 8).round() / 8).astype(BF16)
    q = quantize(jnp.asarray(x), NVFP4, np.float32(2.0**-6), implementation="triton")
    assert mismatches(q.codes, oracle.quantize(x, NVFP4, np.float32(2.0**-6)).codes) > 0


@pytest.mark.parametrize("row", (1 << 20, 40))
def test_offsets_beyond_2_to_the_31(row, monkeypatch):
    program, tile, width = 2**24 - 1, 128, 16
    groups = program * tile + tile - 1
    blocks = -(-row // width)
    expected = [(group // blocks) * row + group % blocks * width for group in range(program * tile, groups)]
    assert offsets_of_program(program, groups, row, width, tile, monkeypatch) == [*expected, -1] and expected[0] > 2**31
