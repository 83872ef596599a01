"""Inputs and comparisons shared by the tests of the quantizers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pallas_kernels import MXFP4, NVFP4, oracle
from pallas_kernels.formats import E2M1_MIDPOINTS, E2M1_VALUES

FORMATS = (NVFP4, MXFP4)
NUDGE = 1 + 2.0**-17
BF16 = ml_dtypes.bfloat16

SHAPES = ((4, 96), (3, 2, 47), (2, 5), (0, 32), (33,))
"""Whole blocks, a block short of one value, less than a block, no rows, one value more than whole blocks without rows."""


def mismatches(actual, expected) -> int:
    """Elements that differ in their bits; any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype == np.uint8:
        return int((actual != expected).sum())
    actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    both_nan = np.isnan(actual) & np.isnan(expected)
    return int(((actual.view(np.uint32) != expected.view(np.uint32)) & ~both_nan).sum())


def all_bf16() -> np.ndarray:
    """Every bfloat16 bit pattern, in an order that mixes magnitudes within blocks; 1024 rows of 64."""
    patterns = np.random.default_rng(65536).permutation(65536).astype(np.uint16)
    return patterns.view(BF16).reshape(1024, 64)


def ladder(dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Every NVFP4 threshold at every scale, one ulp below, on it and above: (x [126, 2, 16], expected code index).

    The first value of a block is 6 * scale, which fixes the scale; the multiplier is one.
    """
    scales = oracle.scale_values(np.arange(1, 0x7F, dtype=np.uint8), NVFP4)[:, None]
    exact = (scales * np.array(E2M1_MIDPOINTS)).astype(np.float32)
    triples = np.stack([np.nextafter(exact, 0), exact, np.nextafter(exact, np.inf)], axis=-1).reshape(126, 21)
    index = np.repeat(np.arange(7), 3) + np.tile([0, 0, 1], 7)
    x = np.zeros((126, 2, 16), np.float32)
    expected = np.zeros((126, 2, 16), int)
    x[:, :, 0], expected[:, :, 0] = 6 * scales, 7
    x[:, 0, 1:12], expected[:, 0, 1:12] = triples[:, :11], index[:11]
    x[:, 1, 1:11], expected[:, 1, 1:11] = triples[:, 11:], index[11:]
    return x.astype(dtype), expected


def golden() -> tuple[np.ndarray, list[str]]:
    """Blocks a * [1, -.5, .3, -.07, 0...] in bfloat16 under the nudged multiplier of amax 1, and "scale:codes" in hex."""
    rows = {1.0: "7B:7D39", 3e-5: "05:7D49", 1e-5: "02:7D39", 3e-6: "01:5B20", 2e-6: "00:0000", 0.0: "00:0000"}
    x = np.zeros((len(rows), 16), BF16)
    x[:, :4] = (np.array(list(rows))[:, None] * np.array([1, -0.5, 0.3, -0.07])).astype(BF16)
    return x, list(rows.values())


def wild(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
    """Finite values over the whole exponent range, with zeros and subnormals among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size=shape, dtype=np.uint32)
    x = bits.view(np.float32).copy()
    x[(bits & 0x7F800000) == 0x7F800000] = 0.0
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), dtype))


def normal(shape: tuple[int, ...], seed: int, dtype=BF16, spread: float = 2.0) -> np.ndarray:
    """Gaussian rows of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(spread * rng.normal(size=(*shape[:-1], 1)))).astype(dtype)


def producer(a, b):
    """Arithmetic in the dtype of its arguments, whose last rounding a compiler may drop when something is fused to it."""
    return a * b + a


def random_bytes(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Uniform bytes."""
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def code_value(code):
    """Signed value of codes 0..15."""
    return np.where(code >= 8, -1.0, 1.0) * np.array(E2M1_VALUES)[code & 7]
