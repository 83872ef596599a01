"""Products with FP4 weights against the dequantized weights in float64, and the GPU's decoding instruction by instruction."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, quantize
from pallas_kernels.containers import Quantized
from pallas_kernels.formats import E2M1_VALUES
from pallas_kernels.grouped_matmul_w4 import decode, pallas
from pallas_kernels.grouped_matmul_w4.api import grouped_matmul_w4a16, matmul_w4
from pallas_kernels.grouped_matmul_w4.layout import CHUNK, W4Weights, prepare_w4, split_columns
from tests.pallas_kernels import products
from tests.pallas_kernels.cases import BF16, FORMATS
from tests.pallas_kernels.test_lowering import lowered

EXPERTS, ROWS, FEATURES, SIZE = 4, 41, 72, 288
"""Neither rows, features nor values are a multiple of a tile; 288 is one chunk and a block of MXFP4."""

SIZES = {"uneven": [20, 0, 1, 20], "rows beyond": [0, 17, 3, 0], "no rows": [0, 0, 0, 0], "one-row groups": [1, 1, 1, 1]}


def arguments(fmt):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, SIZE)).astype(BF16)
    weights = (rng.normal(size=(EXPERTS, FEATURES, SIZE)) * np.exp(rng.normal(size=(EXPERTS, FEATURES, 1)))).astype(BF16)
    amax = np.abs(weights.astype(np.float32)).max(axis=(1, 2))[:, None]
    return x, quantize(jnp.asarray(weights), fmt, oracle.decode_multiplier(amax) if fmt is NVFP4 else None)


def error(out, x, q, sizes) -> float:
    """Over its bound: one rounding to bfloat16 and a float32 sum (`products.excess`)."""
    weights = oracle.dequantize(q, np.float64)
    return products.excess(out, products.forward(x, weights, sizes), products.forward(abs(x), abs(weights), sizes), 8)


def run(x, q, sizes, implementation="pallas", **options):
    return grouped_matmul_w4a16(jnp.asarray(x), q, jnp.asarray(sizes, jnp.int32), implementation=implementation, **options)


TILINGS = {NVFP4: None, MXFP4: pallas.Tiling(features=128, rows=32)}
"""The kernel's own choice, and more of everything in a program: compiling the interpreted body takes most of the time here."""


def run_kernel(x, q, sizes):
    return pallas.grouped_matmul_w4a16(jnp.asarray(x), prepare_w4(q), jnp.asarray(sizes, jnp.int32), TILINGS[q.fmt])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_matches_numpy(fmt):
    x, q = arguments(fmt)
    for sizes in SIZES.values():
        out = run_kernel(x, q, sizes)
        assert out.dtype == jnp.bfloat16
        assert error(out, x, q, sizes) <= 1
        assert error(run(x, q, sizes, "reference"), x, q, sizes) <= 1
        assert not np.asarray(out)[sum(sizes) :].any()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_controls(fmt):
    """A shifted row of scales and swapped experts are seen."""
    x, q = arguments(fmt)
    scales = q.scales.at[0, 3].set(jnp.roll(q.scales[0, 3], 1))
    assert error(run_kernel(x, dataclasses.replace(q, scales=scales), SIZES["uneven"]), x, q, SIZES["uneven"]) > 10
    swapped = jax.tree.map(lambda leaf: leaf[jnp.asarray([3, 1, 2, 0])], q)
    assert error(run_kernel(x, swapped, SIZES["uneven"]), x, q, SIZES["uneven"]) > 100


def test_dense_product():
    x, q = arguments(NVFP4)
    single = jax.tree.map(lambda leaf: leaf[1:2], q)
    one = jax.tree.map(lambda leaf: leaf[0], single)
    # One expert makes few tiles: two programs share the two chunks of each.
    assert pallas.choose_tiling(ROWS, prepare_w4(one), True).splits == 2
    for weights, implementation in ((one, "reference"), (prepare_w4(one), "pallas")):
        out = matmul_w4(jnp.asarray(x).reshape(1, ROWS, SIZE), weights, implementation=implementation)
        assert out.shape == (1, ROWS, FEATURES)
        assert error(out[0], x, single, [ROWS]) <= 1


def test_rounded_activations():
    x, q = arguments(NVFP4)
    rounded = oracle.fake_quant(x, NVFP4, np.float32(2.0**-9))
    options = {"activations": NVFP4, "activation_multiplier": jnp.float32(2.0**-9)}
    assert error(run(x, prepare_w4(q), SIZES["uneven"], **options), rounded, q, SIZES["uneven"]) <= 1
    assert error(run(x, q, SIZES["uneven"], "reference", **options), rounded, q, SIZES["uneven"]) <= 1
    assert error(run(x, q, SIZES["uneven"], "reference", **options), x, q, SIZES["uneven"]) > 10


def test_a_block_that_is_not_finite_makes_its_feature_nan():
    x, q = arguments(NVFP4)
    q = dataclasses.replace(q, scales=q.scales.at[0, 5, 1].set(0x7F))
    out = np.asarray(run(x, prepare_w4(q), SIZES["uneven"])).astype(np.float32)
    assert np.isnan(out[:20, 5]).all() and np.isnan(out).sum() == 20


def test_prepared_weights_stay_small():
    wide = jax.eval_shape(prepare_w4, abstract(NVFP4, (2, 64, 512)))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in (wide.words, wide.scales)) == 2 * 64 * 512 * 4.5 / 8


def test_columns_meet_their_weights():
    """Place p of block c meets column 16 c + p of x."""
    x = jnp.arange(2 * 300, dtype=jnp.float32).reshape(2, 300)
    slices = np.asarray(split_columns(x, 2))
    assert slices.shape == (2, 16, 2, 16)
    assert slices[0, 5, 1, 7] == x[1, 16 * 7 + 5] and slices[1, 3, 0, 1] == x[0, CHUNK + 16 + 3] and slices[1, 0, 0, 4] == 0


def assembly(monkeypatch, function, *operands) -> np.ndarray:
    """The result of a decoding function's assembly on pairs of elements, one PTX instruction after the other."""
    pieces = []

    def record(asm, args, constraints, pack, result_shape_dtypes):
        assert pack == 2
        pieces.append((asm, [np.asarray(arg) for arg in args]))
        return [jnp.zeros(result_shape_dtypes[0].shape, result_shape_dtypes[0].dtype)]

    monkeypatch.setattr(decode.pltriton, "elementwise_inline_asm", record)
    function(*operands)
    ((asm, inputs),) = pieces
    registers: dict[str, Any] = {}
    index = 1
    for array in inputs:
        if array.dtype == np.int32:
            registers[f"${index}"], registers[f"${index + 1}"] = (array[:, lane].astype(np.uint32) for lane in (0, 1))
            index += 2
        else:
            halves = array.view(np.uint16).astype(np.uint32)
            registers[f"${index}"] = halves[:, 0] | halves[:, 1] << 16
            index += 1
    value = lambda name: registers[name] if name in registers else np.uint32(int(name, 16) if name.startswith("0x") else int(name))  # noqa: E731
    lanes = lambda word: np.stack([word & 0xFFFF, word >> 16], -1).astype(np.uint16).view(BF16).astype(np.float32)  # noqa: E731
    for operation, rest in re.findall(r"(\w+)\.\S+ ([^;]+);", asm.replace(".reg .b32 t, u, v;", "")):
        target, *names = [part.strip() for part in rest.split(",")]
        if operation == "prmt":
            low = names[2] == "0x5410"
            first, second = value(names[0]), value(names[1])
            registers[target] = (first & 0xFFFF) | (second << 16) if low else (first >> 16) | (second & 0xFFFF0000)
            assert names[2] in ("0x5410", "0x7632")
        elif operation == "lop3":
            assert names[3] == "0xEA"
            registers[target] = (value(names[0]) & value(names[1])) | value(names[2])
        elif operation == "mul":
            product = (lanes(value(names[0])) * lanes(np.broadcast_to(value(names[1]), value(names[0]).shape))).astype(BF16).view(np.uint16)
            registers[target] = product[:, 0].astype(np.uint32) | product[:, 1].astype(np.uint32) << 16
        else:
            one = {"shl": np.left_shift, "shr": np.right_shift, "and": np.bitwise_and, "mov": lambda a: a}[operation]
            registers[target] = np.asarray(one(*map(value, names)), np.uint32)
    return lanes(registers["$0"])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_assembly_decodes_every_scale(fmt, monkeypatch):
    codes = np.arange(126 if fmt is NVFP4 else 254, dtype=np.uint8).reshape(-1, 2) + (fmt is MXFP4)
    out = assembly(monkeypatch, lambda codes: decode.scale_operand(codes, fmt, False), jnp.asarray(codes))
    factor = 2.0**112 if fmt is NVFP4 else 1.0
    np.testing.assert_array_equal(out, oracle.scale_values(codes, fmt).reshape(codes.shape) * factor)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("place", range(8))
def test_assembly_decodes_every_code(fmt, place, monkeypatch):
    """All 16 codes under scales from the smallest to the largest, the other codes of the words at random."""
    rng = np.random.default_rng(place)
    codes = rng.integers(0, 16, size=(64, 2, 16))
    codes[:, :, place] = np.arange(128).reshape(64, 2) % 16
    packed = oracle.pack_codes(codes.reshape(1, 1, -1)).reshape(128, 1, 8)
    words = first_words(packed, fmt)
    scale = np.repeat(np.array([2.0**-9, 1.0, 13.0, 448.0]), 16).astype(BF16)[:, None].repeat(2, 1)
    factor = 2.0**112 if fmt is NVFP4 else 1.0
    operand = jnp.asarray((scale.astype(np.float32) * factor).astype(BF16))
    out = assembly(monkeypatch, lambda w, s: decode.weight_operand(w, s, place, fmt, False), jnp.asarray(words), operand)
    exact = np.where(codes[..., place] >= 8, -1, 1) * np.array(E2M1_VALUES)[codes[..., place] & 7] * scale.astype(np.float64)
    np.testing.assert_array_equal(out * decode.GPU_FACTOR[fmt.scale], exact)
    interpreted = decode.weight_operand(jnp.asarray(words), jnp.asarray(scale), place, fmt, True)
    np.testing.assert_array_equal(np.asarray(interpreted).astype(np.float64), exact)


def first_words(packed, fmt) -> np.ndarray:
    """The first word of 128 single blocks, as [64, 2]."""
    scales = jnp.full((128, 1, 1), 0x38, jnp.uint8)
    multiplier = jnp.float32(1) if fmt is NVFP4 else None
    q = Quantized(codes=jnp.asarray(packed), scales=scales, multiplier=multiplier, size=16, fmt=fmt)
    return np.asarray(prepare_w4(q).words)[:, 0, 0, 0, 0].reshape(64, 2)


def test_refusals(unchecked):
    x, q = arguments(NVFP4)
    with pytest.raises(ValueError, match="both are the contraction axis"):
        run(x[:, :200], q, SIZES["uneven"])
    with pytest.raises(ValueError, match="as many group sizes"):
        run(x, q, [1, 2])
    with pytest.raises(ValueError, match="counts of rows"):
        grouped_matmul_w4a16(jnp.asarray(x), q, jnp.zeros(EXPERTS))
    with pytest.raises(ValueError, match="the reference takes weights as quantize returns them"):
        run(x, prepare_w4(q), SIZES["uneven"], "reference")
    with pytest.raises(ValueError, match="activation_multiplier without activations"):
        run(x, q, SIZES["uneven"], activation_multiplier=jnp.float32(1))
    with pytest.raises(ValueError, match="use grouped_matmul_w4a16"):
        matmul_w4(jnp.asarray(x), q)
    with pytest.raises(NotImplementedError, match="takes bfloat16 rows"):
        run(x.astype(np.float32), q, SIZES["uneven"])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_kernel_lowers_for_cuda(fmt):
    shape = jax.ShapeDtypeStruct
    weights = jax.eval_shape(prepare_w4, abstract(fmt, (6, 384, 640)))
    for tiling in (None, pallas.Tiling(64, 16), pallas.Tiling(128, 64, 4, 2), pallas.Tiling(128, 16, splits=3)):
        kernel = lambda x, w, g: pallas.grouped_matmul_w4a16(x, w, g, tiling, False)  # noqa: E731, B023
        assert "triton" in lowered(kernel, shape((300, 640), jnp.bfloat16), weights, shape((6,), jnp.int32))


def abstract(fmt, shape):
    return jax.eval_shape(lambda w: quantize(w, fmt), jax.ShapeDtypeStruct(shape, jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rows", (16, 64, 512, 4096))
def test_on_gpu(fmt, rows):
    rng = np.random.default_rng(rows)
    weights = jnp.asarray(rng.normal(size=(32, 256, 768)).astype(ml_dtypes.bfloat16))
    q = quantize(weights, fmt, jnp.float32(2.0**-9) if fmt is NVFP4 else None)
    x = rng.normal(size=(rows, 768)).astype(BF16)
    sizes = np.bincount(rng.integers(0, 32, size=rows - 3), minlength=32)
    assert isinstance(prepared := prepare_w4(q), W4Weights)
    for tiling in (None, pallas.Tiling(64, 16), pallas.Tiling(128, 64), pallas.Tiling(256, 16), pallas.Tiling(splits=3)):
        out = pallas.grouped_matmul_w4a16(jnp.asarray(x), prepared, jnp.asarray(sizes, jnp.int32), tiling)
        assert error(out, x, q, sizes) <= 1
