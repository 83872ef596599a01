"""What every implementation of `residual_fake_quant` must do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, residual_fake_quant
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import FORMATS, NUDGE, mismatches

ROWS, SIZE = (6, 10), 104  # a row ends within a block
MULTIPLIERS = {"nvfp4": (2.0 ** np.arange(-9, -3).astype(np.float32) * np.float32(NUDGE))[:, None], "mxfp4": None}
FREE = np.sort(np.random.default_rng(32).choice(SIZE, size=45, replace=False)).astype(np.int32)
"""Channels one by one; the last of their blocks is cut short."""

BLOCKS = np.concatenate([np.arange(start, start + 32) for start in (0, 64)]).astype(np.int32)
"""Whole blocks of either format."""


def activations(seed: int) -> np.ndarray:
    """A value that is not finite in two rows, a row of about 2^-126, and one beyond what its multiplier reaches."""
    rng = np.random.default_rng(seed)
    x = cases.normal((*ROWS, SIZE), seed)
    x[1, 2, 3], x[4, 0, 100] = np.inf, np.nan
    x[2, 5] = (rng.integers(0, 0x180, SIZE) | rng.integers(0, 2, SIZE) << 15).astype(np.uint16).view(x.dtype)
    x[3, 3] *= np.asarray(2.0**12, x.dtype)
    return x


class ResidualBase:
    """`residual_fake_quant` against the oracle."""

    implementation: str

    def pair(self, x, channels, fmt, multiplier):
        return residual_fake_quant(jnp.asarray(x), jnp.asarray(channels), fmt, multiplier, implementation=self.implementation)

    def check_pair(self, x, channels, fmt, multiplier) -> None:
        expected = oracle.residual_fake_quant(x, channels, fmt, multiplier)
        for result, wanted in zip(self.pair(x, channels, fmt, multiplier), expected, strict=True):
            assert mismatches(result, wanted) == 0

    @pytest.mark.parametrize("channels", (FREE, BLOCKS), ids=("free", "blocks"))
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_both_roundings(self, fmt, channels):
        self.check_pair(activations(1), channels, fmt, MULTIPLIERS[fmt.name])

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_residuals_of_every_bf16_pattern(self, fmt):
        """One multiplier for all of them: most are clipped or zero. A foreign one makes residuals that need rounding."""
        x, channels = cases.all_bf16(), np.arange(0, 64, 2, dtype=np.int32)
        for multiplier in (np.float32(NUDGE), np.float32(0.0007)) if fmt.has_multiplier else (None,):
            self.check_pair(x, channels, fmt, multiplier)

    def test_the_second_rounding_takes_most_of_the_error_away(self):
        x = cases.normal((64, 64), 2, spread=0.0)
        channels = np.arange(64, dtype=np.int32)
        first, second = (np.asarray(each, np.float64) for each in self.pair(x, channels, NVFP4, np.float32(2.0**-9)))
        error, left = x.astype(np.float64) - first, x.astype(np.float64) - first - second
        assert np.square(left).sum() < np.square(error).sum() / 50

    def test_gradient_is_that_of_the_first_rounding(self):
        x = jnp.asarray(cases.normal((6, SIZE), 3))
        cotangents = tuple(jnp.asarray(cases.normal(shape, 4)) for shape in ((6, SIZE), (6, FREE.size)))
        pull = lambda x, cotangents: jax.vjp(lambda x: self.pair(x, FREE, NVFP4, np.float32(0.25)), x)[1](cotangents)  # noqa: E731
        (gradient,) = jax.jit(pull)(x, cotangents)
        assert gradient.dtype == x.dtype and mismatches(gradient, cotangents[0]) == 0

    @pytest.mark.slow
    def test_pair_under_vmap_scan_and_checkpoint(self):
        x = cases.normal((3, 6, SIZE), 5)
        channels = np.stack([FREE, FREE // 2, FREE // 3])
        multipliers = np.array([0.25, 0.5, 2.0**-9 * NUDGE], np.float32)
        one = lambda x, c, m: self.pair(x, c, NVFP4, m)  # noqa: E731
        scan = lambda *xs: jax.lax.scan(lambda carry, xs: (carry, jax.checkpoint(one)(*xs)), None, xs)[1]  # noqa: E731
        results = jax.jit(lambda *xs: (jax.vmap(one)(*xs), scan(*xs)))(*(jnp.asarray(each) for each in (x, channels, multipliers)))
        expected = [oracle.residual_fake_quant(x[i], channels[i], NVFP4, multipliers[i]) for i in range(3)]
        for pair in results:
            for result, wanted in zip(pair, zip(*expected, strict=True), strict=True):
                assert mismatches(result, np.stack(wanted)) == 0

    def test_rows_of_many_programs(self):
        """More rows than a program has, and a number that does not divide them."""
        x = cases.normal((331, 48), 6)
        self.check_pair(x, np.arange(3, 45, 3, dtype=np.int32), MXFP4, None)
