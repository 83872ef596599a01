"""E2M1 rounding by comparisons: a magnitude against thresholds times the block's step.

All products below are exact in float32 (a threshold has at most three significant bits, a step at most four), so the
comparison decides about the real numbers.

NVFP4 counts thresholds with `>`: a tie goes to the smaller code. MXFP4 rounds ties to the even code, so every second
comparison is `>=`.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats import E2M1_MIDPOINTS, E2M1_VALUES, BlockFormat


def _passed(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> list[Bool[Array, "*s"]]:
    """Which of the seven midpoints a magnitude has passed; NaN passes none."""
    ties_to_even = fmt.scale == "e8m0"
    return [a >= threshold * step if ties_to_even and index % 2 else a > threshold * step for index, threshold in enumerate(E2M1_MIDPOINTS)]


def nearest_index(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..7 nearest to a / step; 0 where step is zero."""
    count = _total(jnp.where(passed, 1, 0) for passed in _passed(a, step, fmt))
    return jnp.where(step == 0.0, 0, count)


def nearest_value(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Float[Array, "*s"]:
    """Magnitude of the code nearest to a / step. Where step is zero the caller multiplies by zero."""
    gaps = _gaps()
    return _total(jnp.where(passed, gap, 0.0) for passed, gap in zip(_passed(a, step, fmt), gaps, strict=True))


def lower_bracket(a: Float[Array, "*s"], step: Float[Array, "*b"]) -> tuple[Int[Array, "*s"], Float[Array, "*s"]]:
    """(index, value) of the lower of the two codes around a / step; index <= 6, so a clipped value has {4, 6}."""
    reached = [a >= value * step for value in E2M1_VALUES[1:7]]
    index = _total(jnp.where(hit, 1, 0) for hit in reached)
    value = _total(jnp.where(hit, gap, 0.0) for hit, gap in zip(reached, _gaps(), strict=False))
    return index, value


def bracket_gap(index: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Distance from magnitude `index` (0..6) to the next one."""
    return jnp.where(index < 4, 0.5, jnp.where(index < 6, 1.0, 2.0))


def _gaps() -> list[float]:
    return [high - low for low, high in zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)]


def _total(terms: Iterable[Array]) -> Array:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
