"""The fast rounding of the kernels against the comparisons that define it: every bfloat16 magnitude under every scale."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ladder, reciprocal
from pallas_kernels.arithmetic import e4m3_value
from tests.pallas_kernels.cases import FORMATS

MAGNITUDES = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
"""All normal bfloat16 magnitudes."""


def inputs(fmt):
    """(magnitudes [n, m], steps [1, m]) of a format: with E8M0 the step is 1 or 2, with E4M3 any scale from a byte, zero included."""
    steps = np.asarray(e4m3_value(jnp.arange(0x7F)), np.float32) if fmt.has_multiplier else np.asarray([1.0, 2.0], np.float32)
    magnitudes = np.concatenate([np.zeros(1, np.float32), MAGNITUDES])
    return jnp.asarray(np.broadcast_to(magnitudes[:, None], (magnitudes.size, steps.size))), jnp.asarray(steps)[None, :]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_nearest_code(fmt):
    a, step = inputs(fmt)
    positive = np.asarray(step) > 0
    expected = np.asarray(ladder.nearest_index(a, step, fmt))
    assert set(np.unique(expected)) == set(range(8))
    np.testing.assert_array_equal(np.where(positive, reciprocal.nearest_index(a, step, fmt), 0), expected)
    values = np.where(positive, reciprocal.nearest_value(a, step, fmt), 0.0)
    np.testing.assert_array_equal(values, np.where(positive, ladder.nearest_value(a, step, fmt), 0.0))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("bit", "known"), ((0, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, True), (0, False)))))
def test_code_with_a_low_bit(fmt, bit, known):
    a, step = inputs(fmt)
    positive = np.asarray(step)[0] > 0
    a, step = a[:, positive], step[:, positive]
    bits, mask = jnp.full(a.shape, bit, jnp.int32), jnp.full(a.shape, known)
    expected = np.asarray(ladder.value_with_low_bit(a, step, bits, mask, fmt))
    np.testing.assert_array_equal(np.asarray(reciprocal.value_with_low_bit(a, step, bits, mask, fmt)), expected)
    np.testing.assert_array_equal(np.asarray(reciprocal.lower_index(a, step, fmt)), np.asarray(ladder.lower_index(a, step, fmt)))


@pytest.mark.parametrize("name", ("nearest_value", "lower_index"))
def test_more_significant_bits_need_the_ladder(name):
    """The control: next to a threshold a float32 magnitude is rounded differently, so only bfloat16 may take the shortcut."""
    fmt = FORMATS[0]
    step = jnp.full(1, 7.0, jnp.float32)
    thresholds = jnp.asarray([0.25, 0.5, 1.0, 2.5, 5.0], jnp.float32) * step
    nearby = jnp.concatenate([thresholds * jnp.float32(1 + 2.0**-20), thresholds * jnp.float32(1 - 2.0**-20)])
    fast, exact = (np.asarray(getattr(module, name)(nearby, step, fmt)) for module in (reciprocal, ladder))
    assert (fast != exact).any()
