"""The pairwise rules against the comparisons that define the results: every bfloat16 pattern under every scale byte."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle
from pallas_kernels.dequantize import pairwise as dequantize_pairwise
from pallas_kernels.dequantize import pallas as dequantize_kernel
from pallas_kernels.dequantize import reference as dequantize_reference
from pallas_kernels.guided_fake_quant import pairwise as guided_pairwise
from pallas_kernels.guided_fake_quant import pallas as guided_kernel
from pallas_kernels.guided_fake_quant import reference as guided_reference
from pallas_kernels.quantize import pairwise as quantize_pairwise
from pallas_kernels.quantize import pairwise_e8m0 as quantize_pairwise_e8m0
from pallas_kernels.quantize import pallas as quantize_kernel
from pallas_kernels.quantize import reference as quantize_reference
from tests.pallas_kernels.cases import BF16, NUDGE, mismatches, random_bytes

PATTERNS = np.arange(2**16, dtype=np.uint16).view(BF16)
SCALES = np.arange(256, dtype=np.uint8)
SOME_SCALES = np.delete(SCALES, slice(16, 244))
"""E8M0 bytes: those at either end, where numbers are subnormal or overflow. What lies between differs by its exponent only."""

every_e8m0_byte = pytest.mark.parametrize("bytes_", (SOME_SCALES, pytest.param(SCALES, marks=pytest.mark.slow)), ids=("ends", "all"))


def both_guided(x, record, scales, valid, own, rollout):
    arguments = (*(jnp.asarray(each) for each in (x, record, scales, valid)), jnp.float32(own), jnp.float32(rollout), "mantissa", NVFP4)
    return guided_kernel.guided_fake_quant(*arguments, interpret=True), guided_reference.guided_fake_quant(*arguments)


@pytest.mark.parametrize("bit", (0, pytest.param(255, marks=pytest.mark.slow)))
@pytest.mark.parametrize("multiplier", (2.0**-9 * NUDGE, pytest.param(2.0**7, marks=pytest.mark.slow)))
def test_guided_every_pattern_under_every_scale_byte(bit, multiplier):
    """16,777,216 values; a record of zeros or ones, subnormals, values that are not finite, bytes that are no scales."""
    x = np.broadcast_to(PATTERNS, (64, PATTERNS.size))
    record = np.full((64, PATTERNS.size // 8), bit, np.uint8)
    assert guided_pairwise.fits(*[jnp.full(1, multiplier, jnp.float32)] * 2)
    for some in SCALES.reshape(4, 64, 1):
        scales = np.broadcast_to(some, (64, PATTERNS.size // 16))
        assert mismatches(*both_guided(x, record, scales, np.ones(64, bool), multiplier, multiplier)) == 0


@pytest.mark.slow
def test_guided_rows_without_a_record_and_other_multipliers():
    """Random records and scales, half of the rows not valid; multipliers within and beyond what the rule serves."""
    rng = np.random.default_rng(1)
    x = rng.permuted(np.broadcast_to(np.arange(2**16, dtype=np.uint16), (64, 2**16)), axis=1)
    x = np.where((x & 0x7F80) == 0x7F80, x & 0x3FFF, x).view(BF16)
    record = rng.integers(0, 256, size=(64, x.shape[1] // 8), dtype=np.uint8)
    scales = rng.integers(0, 256, size=(64, x.shape[1] // 16), dtype=np.uint8)
    served = []
    for own, rollout in ((1.0, 2.0**-3 * NUDGE), (2.0**-56, 2.0**-20), (2.0**7, 2.0**8), (2.0**-57, 1.0), (0.0007, 0.0007), (1.0, -1.0)):
        served.append(bool(guided_pairwise.fits(jnp.full(1, own, jnp.float32), jnp.full(1, rollout, jnp.float32))))
        with np.errstate(all="ignore"):
            assert mismatches(*both_guided(x, record, scales, np.arange(64) % 2 == 0, own, rollout)) == 0
    assert served == [True, True, False, False, False, False]


@every_e8m0_byte
@pytest.mark.parametrize(
    ("kind", "per_byte"), (("mantissa", 8), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (("codes", 2), ("scales", None))))
)
def test_guided_every_magnitude_under_e8m0_bytes(kind, per_byte, bytes_):
    """32,768 magnitudes in random signs under each, with random records and, bit by bit, their opposite."""
    magnitudes = np.broadcast_to(PATTERNS.view(np.uint16)[:0x8000], (len(bytes_), 0x8000))
    x = magnitudes | np.random.default_rng(3).integers(0, 2, size=magnitudes.shape, dtype=np.uint16) << 15
    scales, valid = np.broadcast_to(bytes_[:, None], (len(bytes_), 0x8000 // 32)), np.ones(len(bytes_), bool)
    drawn = None if per_byte is None else random_bytes((len(bytes_), 0x8000 // per_byte), 4)
    for record in (drawn, ~drawn) if kind == "mantissa" and drawn is not None else (drawn,):
        arrays = (None if each is None else jnp.asarray(each) for each in (x.view(BF16), record, scales, valid))
        arguments = (*arrays, None, None, kind, MXFP4)
        assert mismatches(guided_kernel.guided_fake_quant(*arguments, interpret=True), guided_reference.guided_fake_quant(*arguments)) == 0


def under_every_scale(largest: np.ndarray, block: int) -> np.ndarray:
    """[s, m]: in row s every finite magnitude of a block with the largest value `largest[s]`, in both signs."""
    rest = np.pad(PATTERNS[:0x7F80], (0, -0x7F80 % (block - 1))).reshape(-1, block - 1)
    blocks = np.zeros((len(largest), len(rest), block), BF16)
    blocks[..., 0] = largest[:, None]
    limit = largest[:, None, None]
    blocks[..., 1:] = np.where(rest.astype(np.float32) <= limit.astype(np.float32), rest, limit)
    blocks.view(np.uint16)[..., 1::2] |= 0x8000
    return blocks.reshape(len(largest), -1)


@pytest.mark.parametrize("multiplier", (1.0, 2.0**-9 * NUDGE, 2.0**-100, 2.0**-101))
def test_quantize_every_magnitude_under_every_scale(multiplier):
    x = jnp.asarray(under_every_scale((6 * oracle.scale_values(SCALES[1:0x7F], NVFP4) * np.float32(multiplier)).astype(BF16), 16))
    m = jnp.full(1, multiplier, jnp.float32)
    assert bool(quantize_pairwise.fits(m)) == (multiplier >= 2.0**-100)
    codes, scales = quantize_kernel.quantize(x, m[0], NVFP4, interpret=True)
    expected_codes, expected_scales = quantize_reference.quantize(x, m[0], NVFP4)
    assert len(np.unique(np.asarray(scales))) >= 100
    assert mismatches(scales, expected_scales) == 0 and mismatches(codes, expected_codes) == 0


@every_e8m0_byte
def test_quantize_every_magnitude_under_e8m0_scales(bytes_):
    """Each scale that a block can get, under the largest of its magnitudes."""
    bytes_ = bytes_[bytes_ < 254].astype(np.uint16)
    largest = np.where(bytes_ == 253, 0x7F7F, ((bytes_ + 2) << 7) + 0x5F).astype(np.uint16)  # mantissa 1.742
    x = jnp.asarray(under_every_scale(largest.view(BF16), 32))
    codes, scales = quantize_kernel.quantize(x, None, MXFP4, interpret=True)
    expected_codes, expected_scales = quantize_reference.quantize(x, None, MXFP4)
    assert (np.asarray(scales) == bytes_[:, None]).all()
    assert mismatches(scales, expected_scales) == 0 and mismatches(codes, expected_codes) == 0


@pytest.mark.parametrize("multiplier", (2.0**-9 * NUDGE, 2.0**-100, 2.0**100, 2.0**-101, 2.0**110, 2.0**-126, 0.0007))
def test_dequantize_every_pair_of_codes_under_every_scale_byte(multiplier):
    """Multipliers within and beyond what the rule serves; bytes that are no scales."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(32, 8), (256, 32, 8)).reshape(-1, 8)
    arguments = jnp.asarray(codes), jnp.asarray(SCALES.repeat(32)[:, None]), jnp.float32(multiplier), 16, NVFP4, jnp.bfloat16
    within = multiplier not in (2.0**-101, 2.0**110, 2.0**-126, 0.0007)
    assert bool(dequantize_pairwise.fits(jnp.zeros(1, jnp.int32), jnp.full(1, multiplier, jnp.float32))) is within
    assert mismatches(dequantize_kernel.dequantize(*arguments, interpret=True), dequantize_reference.dequantize(*arguments)) == 0


@pytest.mark.parametrize("scales", (slice(3, 253), slice(0, 256)), ids=("served", "all"))
def test_dequantize_every_pair_of_codes_under_e8m0_scales(scales):
    chosen = SCALES[scales]
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (len(chosen), 16, 16)).reshape(-1, 16)
    arguments = jnp.asarray(codes), jnp.asarray(chosen.repeat(16)[:, None]), None, 32, MXFP4, jnp.bfloat16
    assert bool(dequantize_pairwise.fits(jnp.asarray(chosen, jnp.int32), None)) is (len(chosen) == 250)
    assert mismatches(dequantize_kernel.dequantize(*arguments, interpret=True), dequantize_reference.dequantize(*arguments)) == 0


def test_multipliers_of_rows():
    rng = np.random.default_rng(2)
    x = rng.permutation(2**16).astype(np.uint16).view(BF16).reshape(64, -1)
    for low in (-126, -60):
        m = jnp.asarray((2.0 ** rng.integers(low, 118, size=64)).astype(np.float32))
        out = quantize_kernel.quantize(jnp.asarray(x), m, NVFP4, interpret=True)
        expected = quantize_reference.quantize(jnp.asarray(x), m, NVFP4)
        assert all(mismatches(*two) == 0 for two in zip(out, expected, strict=True))


def test_a_reciprocal_rounded_to_the_wrong_side_is_seen(monkeypatch):
    """The control: values on a code then lie below it."""
    monkeypatch.setattr(guided_pairwise, "UP", guided_pairwise.DOWN)
    # A shape of its own: what is compiled here must serve no other test.
    x = np.broadcast_to(PATTERNS, (7, PATTERNS.size))
    scales = np.broadcast_to(SCALES[0x39:0x40, None], (7, PATTERNS.size // 16))
    out = both_guided(x, np.full((7, PATTERNS.size // 8), 255, np.uint8), scales, np.ones(7, bool), 1.0, 1.0)
    assert mismatches(*out) > 0


def test_a_tie_that_always_goes_down_is_seen(monkeypatch):
    """The control of MXFP4: the middle of two codes belongs to the even one."""
    monkeypatch.setattr(quantize_pairwise_e8m0, "CODE_ZERO", quantize_pairwise.CODE_ZERO + 1)
    x = jnp.asarray(np.array([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4] * 3, BF16))  # a shape of its own here too
    codes = quantize_kernel.quantize(x, None, MXFP4, interpret=True)[0]
    assert mismatches(codes, quantize_reference.quantize(x, None, MXFP4)[0]) == 3 * 4 * 3  # 0.75, 1.75 and 3.5
