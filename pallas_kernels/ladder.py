"""E2M1 rounding by comparisons: a magnitude against thresholds times the block's step.

All products below are exact in float32 (a threshold has at most three significant bits, a step at most four), so the
comparison decides about the real numbers.

NVFP4 counts thresholds with `>`: a tie goes to the smaller code. MXFP4 rounds ties to the even code, so every second
comparison is `>=`.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.arithmetic import SMALLEST_NORMAL
from pallas_kernels.formats import E2M1_MIDPOINTS, E2M1_VALUES, BlockFormat


def _passed(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> list[Bool[Array, "*s"]]:
    """Which of the seven midpoints a magnitude has passed; NaN passes none."""
    ties_to_even = fmt.scale == "e8m0"
    return [a >= threshold * step if ties_to_even and index % 2 else a > threshold * step for index, threshold in enumerate(E2M1_MIDPOINTS)]


def nearest_index(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..7 nearest to a / step; 0 where step is zero."""
    count = _total(jnp.where(passed, 1, 0) for passed in _passed(a, step, fmt))
    return jnp.where(step == 0.0, 0, count)


def nearest_value(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Float[Array, "*s"]:
    """Magnitude of the code nearest to a / step. Where step is zero the caller multiplies by zero."""
    gaps = _gaps()
    return _total(jnp.where(passed, gap, 0.0) for passed, gap in zip(_passed(a, step, fmt), gaps, strict=True))


def lower_index(a: Float[Array, "*s"], step: Float[Array, "*#s"], fmt: BlockFormat) -> Int[Array, "*s"]:
    """Code 0..6 of the lower of the two codes around a / step; a clipped magnitude has the bracket {4, 6}."""
    return _total(jnp.where(hit, 1, 0) for hit in _reached(a, step))


def value_with_low_bit(
    a: Float[Array, "*s"], step: Float[Array, "*#s"], bit: Int[Array, "*s"], known: Bool[Array, "*#s"], fmt: BlockFormat
) -> Float[Array, "*s"]:
    """Magnitude of the code next to a / step whose low bit is `bit`, of the nearest one where the bit is not known.

    A magnitude on a code stays there; a subnormal one counts as zero here as everywhere.
    """
    a = jnp.where(a < SMALLEST_NORMAL, 0.0, a)
    reached = _reached(a, step)
    index = _total(jnp.where(hit, 1, 0) for hit in reached)
    lower = _total(jnp.where(hit, gap, 0.0) for hit, gap in zip(reached, _gaps(), strict=False))
    gap = jnp.where(index < 4, 0.5, jnp.where(index < 6, 1.0, 2.0))
    middle = (lower + 0.5 * gap) * step
    nearer = a > middle
    if fmt.scale == "e8m0":
        nearer |= (a == middle) & ((index & 1) == 1)
    on_code = (a == lower * step) & (a < 6.0 * step)
    upper = jnp.where(known, ((index & 1) != bit) & ~on_code, nearer)
    return jnp.where(upper, lower + gap, lower)


def _reached(a: Float[Array, "*s"], step: Float[Array, "*#s"]) -> list[Bool[Array, "*s"]]:
    """Which of the codes 1..6 a magnitude has reached."""
    return [a >= value * step for value in E2M1_VALUES[1:7]]


def _gaps() -> list[float]:
    return [high - low for low, high in zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)]


def _total(terms: Iterable[Shaped[Array, "*s"]]) -> Shaped[Array, "*s"]:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
