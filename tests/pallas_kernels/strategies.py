"""Hypothesis strategies: a few shapes (each shape compiles once), values from the bits up."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, SHAPES, normal, wild


@st.composite
def tensors(draw) -> np.ndarray:
    """bfloat16 or float32 arrays of the standard shapes: Gaussian rows or arbitrary bit patterns."""
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from((np.float32, BF16)))
    make = draw(st.sampled_from((normal, wild)))
    return make(shape, draw(st.integers(0, 2**31)), dtype)


@st.composite
def problems(draw):
    """(x, format, multiplier): multiplier None, or for NVFP4 a power of two with or without the nudge."""
    x = draw(tensors())
    fmt = draw(st.sampled_from(FORMATS))
    multiplier = None
    if fmt.has_multiplier and draw(st.booleans()):
        power = 2.0 ** draw(st.integers(-20, 4))
        multiplier = np.float32(power * NUDGE if draw(st.booleans()) else power)
    return x, fmt, multiplier
