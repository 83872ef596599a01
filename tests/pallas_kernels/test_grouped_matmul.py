"""The grouped product and its gradients against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import pallas, reference
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.tiles import count_tiles, row_tiles
from tests.pallas_kernels import products
from tests.pallas_kernels.cases import BF16
from tests.pallas_kernels.test_lowering import lowered

ROWS, FEATURES, SIZE = 75, 48, 32
SIZES = {
    "uneven": [20, 0, 1, 37, 17],
    "rows beyond": [0, 16, 3, 30, 0],
    "one group": [0, 0, 75, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
    "tiles": [16, 16, 16, 16, 11],
}
BITS = {"bfloat16": 8, "float32": 20}
PRODUCTS = ("forward", "grad_x", "grad_weights")


def operands(product: str, dtype=BF16, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    x, cotangent = rng.normal(size=(rows, SIZE)).astype(dtype), rng.normal(size=(rows, FEATURES)).astype(dtype)
    weights = (rng.normal(size=(5, FEATURES, SIZE)) * np.exp(rng.normal(size=(5, 1, 1)))).astype(dtype)
    return {"forward": (x, weights), "grad_x": (cotangent, weights), "grad_weights": (cotangent, x)}[product]


def run(module, product, left, right, sizes, **options):
    return getattr(module, product)(jnp.asarray(left), jnp.asarray(right), jnp.asarray(sizes, jnp.int32), **options)


def error(product, actual, left, right, sizes, dtype="bfloat16") -> float:
    oracle = getattr(products, product)
    return products.excess(actual, oracle(left, right, sizes), oracle(abs(left), abs(right), sizes), BITS[dtype])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SIZES)
def test_pallas_matches_numpy(product, name):
    left, right = operands(product)
    out = run(pallas, product, left, right, SIZES[name], tiling=pallas.Tiling(16, 16, 16))
    assert error(product, out, left, right, SIZES[name]) <= 1
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_reference_matches_numpy(product, dtype):
    for sizes in SIZES.values():
        left, right = operands(product, BF16 if dtype == "bfloat16" else np.float32)
        assert error(product, run(reference, product, left, right, sizes), left, right, sizes, dtype) <= 1


def test_swapped_groups_are_outside_the_bound():
    left, right = operands("forward")
    out = run(pallas, "forward", left, right[[0, 1, 2, 4, 3]], SIZES["uneven"], tiling=pallas.Tiling(16, 16, 16))
    assert error("forward", out, left, right, SIZES["uneven"]) > 100


def test_fewer_rows_than_a_tile():
    for product in PRODUCTS:
        left, right = operands(product, rows=3)
        out = run(pallas, product, left, right, [1, 0, 0, 0, 1], tiling=pallas.Tiling(16, 16, 16))
        assert error(product, out, left, right, [1, 0, 0, 0, 1]) <= 1


def test_a_nan_stays_in_its_group():
    """The last step over a group's rows loads rows of the next group."""
    left, right = operands("grad_weights")
    right[30] = np.nan
    out = np.asarray(run(pallas, "grad_weights", left, right, SIZES["uneven"], tiling=pallas.Tiling(16, 16, 16))).astype(np.float32)
    assert [bool(np.isnan(group).any()) for group in out] == [False, False, False, True, False]


@pytest.mark.parametrize("implementation", ("reference", "pallas", None))
def test_gradients(implementation):
    """At the smallest width that the kernels' own tiles divide."""
    sizes, width = SIZES["rows beyond"], 256
    rng = np.random.default_rng(12)
    x, weights, cotangent = (rng.normal(size=shape).astype(BF16) for shape in ((ROWS, width), (5, width, width), (ROWS, width)))
    product = jax.jit(lambda x, w: jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), implementation=implementation), x, w))
    out, backward = product(jnp.asarray(x), jnp.asarray(weights))
    dx, dw = backward(jnp.asarray(cotangent))
    assert error("forward", out, x, weights, sizes) <= 1
    assert error("grad_x", dx, cotangent, weights, sizes) <= 1
    assert error("grad_weights", dw, cotangent, x, sizes) <= 1
    beyond = sum(sizes)
    assert not np.asarray(out)[beyond:].any() and not np.asarray(dx)[beyond:].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("tile", (16, 32, 128))
def test_tiles_cover_every_row_once(sizes, tile):
    table = row_tiles(jnp.asarray(sizes, jnp.int32), ROWS, tile)
    assert table.start.shape == (count_tiles(ROWS, len(sizes), tile),)
    owner = np.full(ROWS, -1)
    for group, start, stop in zip(*map(np.asarray, table), strict=True):
        assert stop - start <= tile
        for row in range(start, stop):
            assert owner[row] == -1
            owner[row] = group
    expected = np.repeat(range(6), [*sizes, ROWS - sum(sizes)])
    np.testing.assert_array_equal(owner, expected)


def test_refusals(unchecked):
    x, weights = (jnp.asarray(side) for side in operands("forward"))
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    with pytest.raises(ValueError, match="K is the last axis of both"):
        grouped_matmul(x, jnp.swapaxes(weights, 1, 2), sizes)
    with pytest.raises(ValueError, match="both as bfloat16"):
        grouped_matmul(x, weights.astype(jnp.float32), sizes)
    with pytest.raises(ValueError, match="5 groups need"):
        grouped_matmul(x, weights, sizes[:3])
    with pytest.raises(NotImplementedError, match="grouped_matmul has no triton implementation"):
        grouped_matmul(x, weights, sizes, implementation="triton")
    with pytest.raises(NotImplementedError, match="do not divide"):
        grouped_matmul(x, weights, sizes, implementation="pallas")
    with pytest.raises(NotImplementedError, match="take bfloat16"):
        grouped_matmul(x.astype(jnp.float32), weights.astype(jnp.float32), sizes, implementation="pallas")


@pytest.mark.parametrize("product", PRODUCTS)
def test_kernels_lower_for_cuda(product):
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.bfloat16)  # noqa: E731
    x, weights, cotangent = shape(1000, 512), shape(5, 768, 512), shape(1000, 768)
    sides = {"forward": (x, weights), "grad_x": (cotangent, weights), "grad_weights": (cotangent, x)}[product]
    kernel = getattr(pallas, product)
    assert "triton" in lowered(lambda *sides: kernel(*sides, interpret=False), *sides, jax.ShapeDtypeStruct((5,), jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ("reference", "pallas", None))
def test_on_gpu(implementation):
    rng = np.random.default_rng(13)
    sizes = [*np.bincount(rng.integers(0, 15, size=2000), minlength=15), 0]
    x, weights, cotangent = (rng.normal(size=shape).astype(BF16) for shape in ((2050, 512), (16, 768, 512), (2050, 768)))
    function = lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), implementation=implementation)  # noqa: E731
    out, backward = jax.vjp(function, jnp.asarray(x), jnp.asarray(weights))
    dx, dw = backward(jnp.asarray(cotangent))
    assert error("forward", out, x, weights, sizes) <= 1
    assert error("grad_x", dx, cotangent, weights, sizes) <= 1
    assert error("grad_weights", dw, cotangent, x, sizes) <= 1
