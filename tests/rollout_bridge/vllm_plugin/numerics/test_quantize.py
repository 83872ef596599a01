"""The torch quantizers give the bytes of the NumPy oracle and of `pallas_kernels`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import MXFP4, NVFP4, Quantized, oracle
from pallas_kernels import quantize as jnp_quantize
from pallas_kernels.formats import E2M1_MIDPOINTS, E4M3_MAX, E4M3_NAN, E8M0_NAN, RECIPROCAL_SIX
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, mismatches

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402
from rollout_bridge.vllm_plugin.numerics import formats  # noqa: E402
from rollout_bridge.vllm_plugin.numerics.arithmetic import nearest_index  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics import torch_cases  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import differences, to_numpy, to_torch  # noqa: E402

BY_NAME = {"argnames": "fmt", "argvalues": FORMATS, "ids": lambda fmt: fmt.name}


def check(x, fmt, multiplier=None) -> None:
    assert not any(differences(x, fmt, multiplier).values())


def test_formats_and_constants_are_those_of_the_kernels():
    for theirs, ours in torch_cases.FORMATS.items():
        assert (theirs.name, theirs.block, theirs.scale, theirs.has_multiplier) == (ours.name, ours.block, ours.scale, ours.has_multiplier)
    assert (E2M1_MIDPOINTS, E4M3_MAX, E4M3_NAN, E8M0_NAN, RECIPROCAL_SIX) == (
        formats.E2M1_MIDPOINTS,
        formats.E4M3_MAX,
        formats.E4M3_NAN,
        formats.E8M0_NAN,
        formats.RECIPROCAL_SIX,
    )


@pytest.mark.parametrize(**BY_NAME)
def test_exp_10_every_bf16_pattern(fmt):
    """NaN, infinities and subnormals included, then without what is not finite."""
    x = cases.all_bf16()
    check(x, fmt)
    finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), BF16))
    check(finite, fmt)


@pytest.mark.parametrize(**BY_NAME)
def test_every_float16_pattern(fmt):
    x = np.random.default_rng(16).permutation(65536).astype(np.uint16).view(np.float16).reshape(1024, 64)
    check(x, fmt)
    check(np.where(np.isfinite(x), x, np.float16(0)), fmt)


@pytest.mark.parametrize("dtype", (np.float32, np.float16, BF16), ids=("float32", "float16", "bfloat16"))
@pytest.mark.parametrize(**BY_NAME)
def test_whole_exponent_range_and_a_multiplier_for_each_row(fmt, dtype):
    x = cases.wild((64, 96), 7, dtype)
    check(x, fmt)
    if fmt.has_multiplier:
        rows = (2.0 ** np.random.default_rng(8).integers(-126, 118, size=(64,))).astype(np.float32)
        check(x, fmt, rows)
        check(x.reshape(8, 8, 96), fmt, rows[:8, None])
        check(x.reshape(8, 8, 96), fmt, rows[:8])


@st.composite
def problems(draw):
    """Any shape of up to three axes, with zero rows and incomplete blocks; nothing is compiled for it here."""
    rows = draw(st.lists(st.integers(0, 4), max_size=2))
    shape = (*rows, draw(st.integers(1, 70)))
    dtype = draw(st.sampled_from((np.float32, np.float16, BF16)))
    x = draw(st.sampled_from((cases.normal, cases.wild)))(shape, draw(st.integers(0, 2**31)), dtype)
    fmt = draw(st.sampled_from(FORMATS))
    multiplier = None
    if fmt.has_multiplier and draw(st.booleans()):
        size = draw(st.sampled_from(((), shape[:-1])))
        powers = 2.0 ** np.random.default_rng(draw(st.integers(0, 99))).integers(-20, 5, size=size)
        multiplier = np.asarray(powers * draw(st.sampled_from((1.0, NUDGE))), np.float32)
    return x, fmt, multiplier


@given(problem=problems())
def test_any_shape(problem):
    check(*problem)


def test_golden_vectors():
    x, expected = cases.golden()
    q = numerics.quantize(to_torch(x), numerics.NVFP4, 2.0**-11 * NUDGE)
    codes = numerics.unpack_codes(q.codes, 16)[:, :4].tolist()
    assert [f"{scale:02X}:" + "".join(f"{c:X}" for c in row) for scale, row in zip(q.scales[:, 0].tolist(), codes, strict=True)] == expected


def test_every_threshold_at_every_scale():
    x, expected = cases.ladder()
    q = numerics.quantize(to_torch(x), numerics.NVFP4, 1.0)
    np.testing.assert_array_equal(q.scales[:, :, 0].numpy(), np.arange(1, 0x7F)[:, None].repeat(2, 1))
    np.testing.assert_array_equal(numerics.unpack_codes(q.codes, 16).numpy(), expected)
    check(-x, NVFP4, np.float32(NUDGE))


def test_mxfp4_ties_go_to_even_codes():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    q = numerics.quantize(x, numerics.MXFP4)
    assert numerics.unpack_codes(q.codes, 32)[0, :8].tolist() == [7, 0, 2, 2, 4, 4, 6, 6] and q.scales.tolist() == [[127]]


@pytest.mark.parametrize(**BY_NAME)
def test_every_scale_byte_and_code_decodes(fmt):
    """EXP-17: subnormal scales too; bytes that are no scale give NaN. A foreign multiplier is rounded in the stated order."""
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.broadcast_to(oracle.pack_codes(np.arange(fmt.block, dtype=np.uint8) % 16), (256, fmt.block // 2)).copy()
    for multiplier in (1.0, NUDGE, 2.0**-20 * NUDGE, 2.0**-125, 3.7 / 2688) if fmt.has_multiplier else (None,):
        theirs = Quantized(codes, scales, None if multiplier is None else np.float32(multiplier), fmt.block, fmt)
        held = None if multiplier is None else torch.tensor(multiplier, dtype=torch.float32)
        ours = numerics.Quantized(torch.from_numpy(codes), torch.from_numpy(scales), held, fmt.block, torch_cases.FORMATS[fmt])
        assert mismatches(to_numpy(numerics.dequantize(ours, torch.float32)), oracle.dequantize(theirs, np.float32)) == 0


@pytest.mark.parametrize("bad", (np.nan, -np.nan, np.inf, -np.inf))
@pytest.mark.parametrize(**BY_NAME)
def test_p9_what_is_not_finite_makes_its_block_nan(fmt, bad):
    x = cases.normal((2, 3 * fmt.block), 9, np.float32)
    x[1, fmt.block + 3] = bad
    multiplier = np.float32(0.25) if fmt.has_multiplier else None
    nan = np.isnan(numerics.fake_quant(to_torch(x), torch_cases.FORMATS[fmt], multiplier).numpy())
    assert nan[1, fmt.block : 2 * fmt.block].all() and nan.sum() == fmt.block
    check(x, fmt, multiplier)
    check(x, fmt)


@pytest.mark.parametrize(**BY_NAME)
def test_exp_12_zeros_stay_zero_and_codes_are_never_minus_zero(fmt):
    check(np.zeros((2, 64), BF16), fmt)
    x = np.where(np.arange(64) % 2, -1e-3, 1.0).astype(np.float32).reshape(2, 32)
    x[0, 1] = -0.0
    mine = torch_cases.FORMATS[fmt]
    assert not (numerics.unpack_codes(numerics.quantize(to_torch(x), mine).codes, 32) == 8).any()
    out = numerics.fake_quant(to_torch(x), mine)
    assert not torch.signbit(out[out == 0]).any()


def test_multipliers_are_the_oracle_s():
    border = np.array([2688, np.nextafter(np.float32(2688), np.float32(3000))], np.float32)
    amax = np.concatenate([cases.all_bf16().astype(np.float32).reshape(-1), border])
    for nudged in (True, False):
        found = numerics.decode_multiplier(torch.from_numpy(amax), nudged=nudged).numpy()
        assert mismatches(found, oracle.decode_multiplier(amax, nudged=nudged)) == 0


@pytest.mark.parametrize(**BY_NAME)
def test_the_jax_quantizer_gives_the_same_bytes(fmt):
    x = cases.normal((8, 96), 4)
    theirs, ours = jnp_quantize(jnp.asarray(x), fmt), numerics.quantize(to_torch(x), torch_cases.FORMATS[fmt])
    assert mismatches(ours.codes.numpy(), theirs.codes) == 0 and mismatches(ours.scales.numpy(), theirs.scales) == 0


def test_the_comparison_sees_other_numerics():
    """Controls: a multiplier twice as large, and MXFP4's ties in NVFP4, are told apart."""
    x = (np.random.default_rng(12).integers(-96, 97, size=(64, 96)) / 16).astype(BF16)
    expected = oracle.quantize(x, NVFP4, np.float32(1))
    doubled = numerics.quantize(to_torch(x), numerics.NVFP4, 2.0)
    assert mismatches(doubled.scales.numpy(), expected.scales) > 300
    steps = torch.from_numpy(oracle.scale_values(expected.scales, NVFP4).astype(np.float32))[..., None]
    magnitudes = to_torch(x).to(torch.float32).abs().reshape(64, 6, 16)
    strict, even = (nearest_index(magnitudes, steps, ties_to_even=even) for even in (False, True))
    np.testing.assert_array_equal(strict.reshape(64, 96).numpy(), oracle.unpack_codes(expected.codes, 96) & 7)
    assert int((strict != even).sum()) > 50


def test_wrong_input_is_named():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="int32"):
        numerics.quantize(x.to(torch.int32), numerics.NVFP4)
    with pytest.raises(ValueError, match="must not be empty"):
        numerics.quantize(x[:, :0], numerics.NVFP4)
    with pytest.raises(ValueError, match="mxfp4 has no multiplier"):
        numerics.fake_quant(x, numerics.MXFP4, 1.0)
    with pytest.raises(ValueError, match=r"shape \(3,\) does not broadcast"):
        numerics.quantize(x, numerics.NVFP4, torch.ones(3))
    with pytest.raises(ValueError, match="take 16 bytes"):
        numerics.unpack_codes(torch.zeros(2, 8, dtype=torch.uint8), 32)


def test_results_do_not_depend_on_flushing_of_subnormals():
    """torch can be told to flush them; the contract does so itself."""
    x = cases.wild((64, 96), 21)
    rows = np.full((64,), 2.0**-126, np.float32)
    assert torch.set_flush_denormal(True)
    try:
        check(x, NVFP4, rows)
        check(x, MXFP4)
    finally:
        torch.set_flush_denormal(False)
    check(x, NVFP4, rows)
