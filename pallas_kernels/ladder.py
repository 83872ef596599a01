"""E2M1 rounding by comparisons: a magnitude against thresholds times the block's step.

All products below are exact in float32 (a threshold has at most three significant bits, a step at most four), so the
comparison decides about the real numbers.

NVFP4 counts thresholds with `>`: a tie goes to the smaller code. MXFP4 rounds ties to the even code, so every second
comparison is `>=`.
"""

from collections.abc import Iterable
from typing import NamedTuple

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


class Bracket(NamedTuple):
    """The two codes around a magnitude.

    Attributes:
      index: code 0..6 of the lower one; a clipped magnitude has the bracket {4, 6}.
      value: its magnitude.
      gap: distance from it to the upper one.
      on_code: the magnitude is the lower code exactly.
      upper: the upper code is the nearest one, by the format's rule for ties.
    """

    index: Int[Array, "*s"]
    value: Float[Array, "*s"]
    gap: Float[Array, "*s"]
    on_code: Bool[Array, "*s"]
    upper: Bool[Array, "*s"]


def bracket(a: Float[Array, "*s"], step: Float[Array, "*b"], fmt: BlockFormat) -> Bracket:
    """The two codes around a / step."""
    reached = [a >= value * step for value in E2M1_VALUES[1:7]]
    index = _total(jnp.where(hit, 1, 0) for hit in reached)
    value = _total(jnp.where(hit, gap, 0.0) for hit, gap in zip(reached, _gaps(), strict=False))
    gap = jnp.where(index < 4, 0.5, jnp.where(index < 6, 1.0, 2.0))
    middle = (value + 0.5 * gap) * step
    upper = a > middle
    if fmt.scale == "e8m0":
        upper |= (a == middle) & ((index & 1) == 1)
    return Bracket(index, value, gap, (a == value * step) & (a < 6.0 * step), upper)


def _gaps() -> list[float]:
    return [high - low for low, high in zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)]


def _total(terms: Iterable[Array]) -> Array:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
