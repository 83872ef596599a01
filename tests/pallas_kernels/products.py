"""Oracles, inputs and the error bound of the matrix products."""

from __future__ import annotations

import numpy as np


def sorted_rows(sizes, count: int) -> list[tuple[int, slice]]:
    """(group, its rows) for rows sorted by group."""
    stops = np.minimum(np.cumsum(sizes), count)
    return [(group, slice(stop - size, stop)) for group, (size, stop) in enumerate(zip(sizes, stops, strict=True)) if size]


def forward(x, weights, sizes) -> np.ndarray:
    """x times the transposed weights of each row's group, in float64."""
    out = np.zeros((x.shape[0], weights.shape[1]))
    for group, rows in sorted_rows(sizes, x.shape[0]):
        out[rows] = x[rows].astype(np.float64) @ weights[group].astype(np.float64).T
    return out


def grad_x(cotangent, weights, sizes) -> np.ndarray:
    """The cotangent of x, in float64."""
    return forward(cotangent, np.swapaxes(weights, 1, 2), sizes)


def grad_weights(cotangent, x, sizes) -> np.ndarray:
    """The cotangent of the weights, in float64."""
    out = np.zeros((len(sizes), cotangent.shape[1], x.shape[1]))
    for group, rows in sorted_rows(sizes, x.shape[0]):
        out[group] = cotangent[rows].astype(np.float64).T @ x[rows].astype(np.float64)
    return out


def excess(actual, expected, magnitude, bits: int) -> float:
    """Largest error over its bound; above 1 is a failure.

    The bound is one rounding of the result to `bits` significant bits (half a unit is 2^-bits of the value at most) plus that of a
    float32 sum: 2^-20 of the sum of the magnitudes of its terms (`magnitude`, the same product of absolute values).
    """
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return float(np.max(np.abs(actual - expected) / (2.0**-bits * np.abs(expected) + 2.0**-20 * magnitude + 1e-30)))
