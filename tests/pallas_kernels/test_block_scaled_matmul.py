"""The native FP4 product: reference against float64, layouts against index formulas, the kernel as far as a CPU can take it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, quantize
from pallas_kernels.block_scaled_matmul import device, mosaic, reference, selftest
from pallas_kernels.block_scaled_matmul.api import grouped_block_scaled_matmul
from pallas_kernels.block_scaled_matmul.epilogue import row_factors
from pallas_kernels.block_scaled_matmul.layout import swizzle_scales, tile_operand, unswizzle_scales
from pallas_kernels.block_scaled_matmul.row_padding import padded_rows, take_rows
from pallas_kernels.grouped_matmul.tiles import row_tiles
from tests.pallas_kernels import emulated_tcgen05, products
from tests.pallas_kernels.cases import FORMATS, code_value, normal, random_bytes

ROWS, FEATURES, SIZE = 290, 40, 96
SIZES = {
    "uneven": [130, 0, 1, 159],
    "rows beyond": [0, 17, 128, 5],
    "one group": [0, 0, 290, 0],
    "no rows": [0, 0, 0, 0],
    "tiles": [128, 128, 34, 0],
}


def arguments(fmt, rows=ROWS, features=FEATURES, size=SIZE):
    """Quantized rows with a multiplier each and weights with one for each expert."""
    x, weights = normal((rows, size), 1), normal((4, features, size), 2, spread=1.0)
    if fmt is MXFP4:
        return quantize(jnp.asarray(x), fmt), quantize(jnp.asarray(weights), fmt)
    amax = [np.abs(side.astype(np.float32)).max(axis=axes, keepdims=True)[..., 0] for side, axes in ((x, 1), (weights, (1, 2)))]
    return tuple(quantize(jnp.asarray(side), fmt, oracle.decode_multiplier(most)) for side, most in zip((x, weights), amax, strict=True))


def error(out, x, weights, sizes) -> float:
    """Over its bound: one rounding to bfloat16 and a float32 sum (`products.excess`). Multipliers meet in float32, as in an engine."""
    left, right = (oracle.dequantize(dataclasses.replace(q, multiplier=np.float32(1)), np.float64) for q in (x, weights))
    factors = np.ones((left.shape[0], 1))
    if x.fmt is NVFP4:
        one = np.broadcast_to(np.asarray(x.multiplier), left.shape[:1])
        other = np.broadcast_to(np.asarray(weights.multiplier), right.shape[:2])
        factors = np.zeros((len(one), other.shape[1]))
        for group, rows in products.sorted_rows(sizes, len(one)):
            factors[rows] = one[rows, None] * other[group]
        assert (one.dtype, other.dtype) == (np.float32, np.float32)
    expected, magnitude = products.forward(left, right, sizes), products.forward(abs(left), abs(right), sizes)
    return products.excess(out, expected * factors, magnitude * factors, 8)


def run(x, weights, sizes, implementation="reference"):
    return grouped_block_scaled_matmul(x, weights, jnp.asarray(sizes, jnp.int32), implementation=implementation)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_reference_matches_numpy(fmt):
    x, weights = arguments(fmt)
    for sizes in SIZES.values():
        out = run(x, weights, sizes)
        assert out.dtype == jnp.bfloat16
        assert error(out, x, weights, sizes) <= 1
        assert not np.asarray(out)[sum(sizes) :].any()


@pytest.mark.parametrize("ends", ((), (1,)), ids=("scalars", "ones and features"))
def test_multipliers_of_other_shapes(ends):
    x, weights = arguments(NVFP4)
    other = np.linspace(0.1, 2, FEATURES, dtype=np.float32)[None] if ends else np.float32(0.7)
    x, weights = dataclasses.replace(x, multiplier=jnp.full(ends, 0.3)), dataclasses.replace(weights, multiplier=jnp.asarray(other))
    assert error(run(x, weights, SIZES["uneven"]), x, weights, SIZES["uneven"]) <= 1


def test_factors_are_float32_products_bit_for_bit():
    """Of nudged multipliers too: an engine does not take the nudge off."""
    x, weights = arguments(NVFP4)
    factors = np.asarray(row_factors(x, weights, jnp.asarray(SIZES["uneven"], jnp.int32)))
    experts = np.repeat(range(4), SIZES["uneven"])
    expected = np.asarray(x.multiplier)[:, None] * np.asarray(weights.multiplier)[experts]
    assert expected.dtype == np.float32 and factors.dtype == np.float32
    np.testing.assert_array_equal(factors, expected)
    assert ((factors.view(np.uint32) & 0x7FFFFF) == 0x80).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_controls(fmt):
    """Shifted scales of one expert, scales of the neighbouring row, and swapped experts are seen."""
    x, weights = arguments(fmt)
    sizes = SIZES["uneven"]
    shifted = dataclasses.replace(weights, scales=weights.scales.at[3].set(jnp.roll(weights.scales[3], 1, axis=-1)))
    assert error(run(x, shifted, sizes), x, weights, sizes) > 10
    assert error(run(dataclasses.replace(x, scales=jnp.roll(x.scales, 1, axis=0)), weights, sizes), x, weights, sizes) > 10
    assert error(run(x, jax.tree.map(lambda leaf: leaf[jnp.asarray([3, 1, 2, 0])], weights), sizes), x, weights, sizes) > 100


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_block_that_is_not_finite_makes_its_feature_nan(fmt):
    x, weights = arguments(fmt)
    weights = dataclasses.replace(weights, scales=weights.scales.at[0, 5, 1].set(0x7F if fmt is NVFP4 else 0xFF))
    out = np.asarray(run(x, weights, SIZES["uneven"])).astype(np.float32)
    # On a CPU `ragged_dot_general` spreads it to the rows of other groups, so only this much can be asked of the reference.
    assert np.isnan(out[:130, 5]).all() and np.isfinite(np.delete(out, 5, axis=1)).all()


@pytest.mark.parametrize(("rows", "blocks"), ((128, 4), (1, 1), (300, 6), (257, 13)))
def test_scale_order_against_its_formula(rows, blocks):
    scales = np.maximum(random_bytes((2, rows, blocks), rows), 1)
    column_tiles = -(-blocks // 4)
    expected = np.zeros((2, -(-rows // 128) * column_tiles * 512), np.uint8)
    for m in range(rows):
        for k in range(blocks):
            offset = ((m >> 7) * column_tiles + (k >> 2)) * 512 + (m & 31) * 16 + ((m >> 5) & 3) * 4 + (k & 3)
            expected[:, offset] = scales[:, m, k]
    swizzled = swizzle_scales(jnp.asarray(scales))
    assert swizzled.shape == (2, -(-rows // 128), column_tiles, 32, 16)
    np.testing.assert_array_equal(np.asarray(swizzled).reshape(2, -1), expected)
    np.testing.assert_array_equal(unswizzle_scales(swizzled, rows, blocks), scales)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_operands_are_whole_tiles_with_zero_padding(fmt):
    """Every byte keeps its value under the hardware's types, whatever it is; an odd last code and a part of a block among them."""
    rows, size = 130, 331
    codes = random_bytes((rows, fmt.codes_bytes(size)), 3)
    codes[:, -1] &= 15
    scales = np.minimum(random_bytes((rows, fmt.scales_bytes(size)), 4), 0x7E)
    operand = tile_operand(jnp.asarray(codes), jnp.asarray(scales), fmt)
    assert operand.values.shape == (256, 512) and operand.scales.shape == (2, 512 // fmt.block // 4, 32, 16)
    values = np.asarray(operand.values).astype(np.float32)
    np.testing.assert_array_equal(values[:rows, :size], code_value(oracle.unpack_codes(codes, size)))
    assert not values[rows:].any() and not values[:, size:].any()
    as_bytes = jax.lax.bitcast_convert_type(operand.scales, jnp.uint8)
    np.testing.assert_array_equal(unswizzle_scales(as_bytes, rows, scales.shape[1]), scales)
    plain = np.asarray(unswizzle_scales(as_bytes, 256, 512 // fmt.block))
    assert not plain[rows:].any() and not plain[:, scales.shape[1] :].any()
    expected = oracle.scale_values(scales[:1, :1], fmt)
    assert np.asarray(operand.scales).astype(np.float64)[0, 0, 0, 0] == expected


@jax.jit
def table(sizes):
    tiles = row_tiles(sizes, ROWS, 128)
    return tiles, padded_rows(tiles, 128, ROWS)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_padded_rows_keep_groups_apart(sizes):
    tiles, source = table(jnp.asarray(sizes, jnp.int32))
    owner = np.repeat(range(5), [*sizes, ROWS - sum(sizes)])
    source = np.asarray(source)
    real = source < ROWS
    np.testing.assert_array_equal(np.sort(source[real]), np.arange(ROWS))
    np.testing.assert_array_equal(owner[source[real]], np.repeat(np.asarray(tiles.group), 128)[real])
    taken = np.asarray(take_rows(jnp.arange(1, ROWS + 1)[:, None], jnp.asarray(source)))[:, 0]
    np.testing.assert_array_equal(taken, np.where(real, source + 1, 0))


def test_refusals(unchecked):
    x, weights = arguments(NVFP4)
    with pytest.raises(ValueError, match=r"rows \[N, K\] meet weights \[E, F, K\]"):
        run(x, x, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="rows are nvfp4 and weights mxfp4"):
        run(x, arguments(MXFP4)[1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="both are the contraction axis"):
        run(x, arguments(NVFP4, size=64)[1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="4 experts need as many int32 sizes"):
        run(x, weights, [1, 2])
    with pytest.raises(ValueError, match="weights in nvfp4 need a multiplier"):
        run(x, dataclasses.replace(weights, multiplier=None), [1, 2, 3, 4])
    with pytest.raises(NotImplementedError, match=r"compute capability 10.x \(SM100\), not on cpu"):
        run(x, weights, [1, 2, 3, 4], "pallas")


def test_the_kernel_refuses_what_it_cannot_serve():
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    x, weights = arguments(NVFP4)
    with pytest.raises(NotImplementedError, match="at least one row"):
        jax.eval_shape(mosaic.grouped_block_scaled_matmul, jax.tree.map(lambda leaf: leaf[:0], x), weights, sizes)
    weights = dataclasses.replace(weights, multiplier=jnp.ones((4, FEATURES)))
    with pytest.raises(NotImplementedError, match="one multiplier for each expert"):
        jax.eval_shape(mosaic.grouped_block_scaled_matmul, x, weights, sizes)


@pytest.mark.parametrize(
    ("platform", "capability", "runs"),
    (
        ("gpu", "10.0", True),
        ("gpu", "10.3", True),
        ("gpu", "9.0", False),
        ("gpu", "12.0", False),
        ("gpu", "gfx950", False),
        ("tpu", None, False),
    ),
)
def test_devices(platform, capability, runs, monkeypatch):
    """From 12.x on a chip can have FP4 tensor cores without the instructions of SM100."""
    found = types.SimpleNamespace(platform=platform, device_kind="a device", compute_capability=capability)
    monkeypatch.setattr(device.jax, "devices", lambda: [found])
    with contextlib.nullcontext() if runs else pytest.raises(NotImplementedError, match="not on a device"):
        device.require_sm100()


def lowered(fmt, monkeypatch, **options):
    """The kernel lowered for SM100; `options` are those of jit."""
    # jax takes the architecture from the device at hand, and that of Hopper without one. The function moved in 0.11.
    place = "core" if jax.__version_info__ < (0, 11) else "utils"
    monkeypatch.setattr(importlib.import_module(f"jax.experimental.mosaic.gpu.{place}"), "_infer_arch", lambda: (10, 0))
    shape = jax.ShapeDtypeStruct
    x, weights = (jax.eval_shape(lambda w: quantize(w, fmt), shape(axes, jnp.bfloat16)) for axes in ((300, 700), (6, 330, 700)))
    described = contextlib.nullcontext()
    if place == "utils":
        from jax.sharding import AbstractDevice, AbstractMesh

        described = jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA B200", 148, "gpu")))
    kernel = jax.jit(lambda *arguments: mosaic.grouped_block_scaled_matmul(*arguments), **options)
    with described:
        return kernel.trace(x, weights, shape((6,), jnp.int32)).lower(lowering_platforms=("cuda",))


def payload(module) -> str:
    """The text of the kernel's own module inside the custom call of the lowered program."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    calls = [call for call in operations(module.operation) if call.name == "stablehlo.custom_call"]
    (call,) = [call for call in calls if ir.StringAttr(call.attributes["call_target_name"]).value == "mosaic_gpu_v2"]
    bytecode = ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["module"]).value_bytes
    with make_ir_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode))


def operations(operation):
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from operations(inner.operation)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_kernel_lowers_for_sm100(fmt, monkeypatch):
    """A step of 256 values is four products of 64, each with the scales of both sides; a copy moves the scales of 128 rows and 4 blocks."""
    text = payload(lowered(fmt, monkeypatch).compiler_ir())
    assert "mosaic_gpu.arch_major = 10" in text
    vector = "4X" if fmt is NVFP4 else "2X"
    assert len(re.findall(rf"tcgen05\.mma\.cta_group::1\.kind::mxf4(?:nvf4)?\.block_scale\.scale_vec::{vector} ", text)) == 4
    assert len(re.findall(r"tcgen05\.mma", text)) == 4
    # jax 0.11 writes the copy as assembly, 0.10 as an operation.
    copies = re.findall(r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4|nvvm\.tcgen05\.cp\"", text)
    assert len(copies) == 2 * 256 // fmt.block // 4
    for dtype in ("f4E2M1FN", "f8E4M3FN" if fmt is NVFP4 else "f8E8M0FNU"):
        assert f"x{dtype}" in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 cannot interpret Mosaic GPU kernels")
def test_schedule_with_emulated_instructions(monkeypatch):
    """All of the kernel but the two instructions themselves: tables, copies, ring, barriers, epilogue and partial stores, without races."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    for name in ("async_copy_scales_to_tmem", "tcgen05_mma"):
        monkeypatch.setattr(mosaic.plgpu, name, getattr(emulated_tcgen05, name))
    # A group of two tiles, one that starts inside a tile, two tiles of columns, three steps around a ring of two buffers.
    monkeypatch.setattr(mosaic, "STAGES", 2)
    x, weights = arguments(NVFP4, rows=148, features=140, size=600)
    sizes = [131, 0, 7, 0]
    without_rows = dataclasses.replace(weights, scales=weights.scales.at[jnp.asarray([1, 3])].set(0x7F))
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = mosaic.grouped_block_scaled_matmul(x, without_rows, jnp.asarray(sizes, jnp.int32))
    assert error(out, x, weights, sizes) <= 1
    assert not np.asarray(out)[sum(sizes) :].any()
    assert not gpu_callbacks.get_races().races_found
    assert error(out, dataclasses.replace(x, scales=jnp.roll(x.scales, 1, axis=0)), weights, sizes) > 10


def test_selftest_tells_right_from_wrong(capsys):
    lines: list[str] = []
    assert selftest.run(reference.grouped_block_scaled_matmul, lines.append)
    assert len(lines) == 13 and not [line for line in lines if "WRONG" in line or "NOT SEEN" in line]
    # A kernel that takes the scales of the neighbouring row passes as long as they do not vary along the rows.
    sizes = jnp.asarray(selftest.GROUP_SIZES, jnp.int32)
    product = lambda x, w, s: reference.grouped_block_scaled_matmul(dataclasses.replace(x, scales=jnp.roll(x.scales, 1, axis=0)), w, s)  # noqa: E731
    errors = [
        selftest.excess(product, x, w, np.asarray(reference.grouped_block_scaled_matmul(x, w, sizes)).astype(np.float64))
        for _, x, w in list(selftest.cases(NVFP4))[:4]
    ]
    assert [error <= 1 for error in errors] == [True, True, False, True]
    assert selftest.main() == 2
    assert capsys.readouterr().out == "the block-scaled kernel runs on NVIDIA GPUs of compute capability 10.x (SM100), not on cpu\n"


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_on_gpu(fmt):
    """The reference, whose products are exact also in TF32; and the kernel where there is one."""
    x, weights = arguments(fmt, rows=700, features=256, size=768)
    sizes = [300, 0, 129, 260]
    assert error(run(x, weights, sizes, "reference"), x, weights, sizes) <= 1
    try:
        device.require_sm100()
    except NotImplementedError:
        return
    assert selftest.run(lambda *arguments: grouped_block_scaled_matmul(*arguments, implementation="pallas"))
