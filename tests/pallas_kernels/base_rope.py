"""What every implementation of `rope_fake_quant` must do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, rope_fake_quant, rope_tables
from pallas_kernels.rope_fake_quant import rule
from pallas_kernels.rope_fake_quant.pallas import plan_halves, rotated
from tests.pallas_kernels import cases
from tests.pallas_kernels.base_fused import gradients, produced
from tests.pallas_kernels.base_guided import random_guide
from tests.pallas_kernels.cases import FORMATS, NUDGE, mismatches

SHAPE = (2, 9, 3, 64)
MULTIPLIERS = {"nvfp4": 2.0 ** np.arange(-9, -6).astype(np.float32), "mxfp4": None}
"""One for each head; plain, as those of keys are."""

tables = jax.jit(rope_tables, static_argnums=(1, 2))


def keys(seed: int, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads, with a value that is not finite in two of them and one of about 2^-126, and their tables."""
    rng = np.random.default_rng(seed)
    x = cases.normal(shape, seed)
    x[0, 1, 0, 3], x[1, 4, 2, 60] = np.inf, np.nan
    x[1, 5, 1] = (rng.integers(0, 0x180, shape[-1]) | rng.integers(0, 2, shape[-1]) << 15).astype(np.uint16).view(x.dtype)
    return x, *turns(shape[:-2], shape[-1], seed)


def turns(rows: tuple[int, ...], head_dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of random positions, the first of which are zero and one."""
    positions = np.random.default_rng(seed).integers(0, 40960, size=rows, dtype=np.int32)
    positions.reshape(-1)[:2] = 0, 1
    cos, sin = tables(jnp.asarray(positions), head_dim, 1e6)
    return np.asarray(cos), np.asarray(sin)


class RopeBase:
    """`rope_fake_quant` against the oracle's rotation and rounding, one after the other."""

    implementation: str

    def rope(self, x, cos, sin, fmt, multiplier, guide=None):
        guide = jax.tree.map(jnp.asarray, guide)
        x, cos, sin = (jnp.asarray(each) for each in (x, cos, sin))
        return rope_fake_quant(x, cos, sin, fmt, multiplier, guide, implementation=self.implementation)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_rotation_rounded_to_the_nearest_code(self, fmt):
        arrays = keys(1)
        expected = oracle.fake_quant(oracle.rotate(*arrays), fmt, MULTIPLIERS[fmt.name])
        # A value spoils its block and that of its pair.
        assert np.isnan(expected.astype(np.float32)).sum() == 4 * fmt.block
        assert mismatches(self.rope(*arrays, fmt, MULTIPLIERS[fmt.name]), expected) == 0

    @pytest.mark.parametrize(
        ("fmt", "kind"), ((NVFP4, "mantissa"), (NVFP4, "codes"), (MXFP4, "mantissa")), ids=lambda v: getattr(v, "name", v)
    )
    def test_rotation_rounded_under_a_record(self, fmt, kind):
        arrays = keys(2)
        turned, own = oracle.rotate(*arrays), MULTIPLIERS[fmt.name]
        rollout = None if own is None else np.float32(2.0**-7)
        with np.errstate(all="ignore"):
            guide = random_guide(turned, kind, fmt, 3, oracle.quantize(turned, fmt, rollout).scales, rollout)
            expected = oracle.guided_fake_quant(turned, guide, fmt, own)
        assert mismatches(self.rope(*arrays, fmt, own, guide), expected) == 0

    def test_gradient_of_the_rotation_passes_through_the_rounding(self):
        """That of a rotation turns back."""
        x, cotangent = (cases.normal(SHAPE, seed, spread=0.0) for seed in (3, 4))
        cos, sin = turns(SHAPE[:-2], SHAPE[-1], 3)
        fused = gradients(lambda x, _: self.rope(x, cos, sin, NVFP4, np.float32(0.25)), x, x, jnp.asarray(cotangent))[0]
        unfused = gradients(lambda x, _: rule.rotate(x, jnp.asarray(cos), jnp.asarray(sin)), x, x, jnp.asarray(cotangent))[0]
        assert fused.dtype == x.dtype and mismatches(fused, unfused) == 0
        back = oracle.rotate(cotangent.astype(np.float32), cos, -sin)
        np.testing.assert_allclose(np.asarray(fused, np.float32), back, rtol=2.0**-7, atol=2.0**-6)

    @pytest.mark.slow
    def test_rotation_under_vmap_scan_and_checkpoint(self):
        x, (cos, sin) = cases.normal((3, *SHAPE), 5), turns((3, *SHAPE[:-2]), SHAPE[-1], 5)
        multipliers = np.array([0.25, 0.5, 2.0**-9 * NUDGE], np.float32)
        one = lambda x, cos, sin, m: self.rope(x, cos, sin, NVFP4, m)  # noqa: E731
        scan = lambda *xs: jax.lax.scan(lambda carry, xs: (carry, jax.checkpoint(one)(*xs)), None, xs)[1]  # noqa: E731
        mapped, scanned = jax.jit(lambda *xs: (jax.vmap(one)(*xs), scan(*xs)))(*(jnp.asarray(each) for each in (x, cos, sin, multipliers)))
        expected = oracle.fake_quant(oracle.rotate(x, cos, sin), NVFP4, multipliers[:, None, None, None])
        assert mismatches(mapped, expected) == 0 and mismatches(scanned, expected) == 0


class RopeSourceBase:
    """The values before the rounding, which four bits would hide: those of the oracle, every bit."""

    def test_values_of_the_rotation(self):
        x = cases.all_bf16().reshape(256, 4, 64)
        arrays = x, *turns((256,), 64, 6)
        expected = oracle.rotate(*arrays)
        assert mismatches(produced(rotated, plan_halves(x.shape, NVFP4, None))(*arrays), expected) == 0
        assert mismatches(jax.jit(rule.rotate)(*arrays), expected) == 0
