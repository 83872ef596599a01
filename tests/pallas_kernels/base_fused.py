"""What every implementation of the fused roundings must do, and what their kernels must compute before they round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, oracle, rms_norm_fake_quant, swiglu_fake_quant
from pallas_kernels.groups import plan
from pallas_kernels.rms_norm_fake_quant import rule
from pallas_kernels.rms_norm_fake_quant.pallas import normalized
from pallas_kernels.swiglu_fake_quant.pallas import activated
from pallas_kernels.swiglu_fake_quant.rule import swiglu
from tests.pallas_kernels import cases
from tests.pallas_kernels.base_guided import random_guide
from tests.pallas_kernels.cases import FORMATS, NUDGE, mismatches

EPS = 1e-6
ROWS, SIZE = (6, 40), 104  # a row ends within a block
MULTIPLIERS = {"nvfp4": (2.0 ** np.arange(-9, -3).astype(np.float32) * np.float32(NUDGE))[:, None], "mxfp4": None}

inverse_rms = jax.jit(rule.inverse_rms, static_argnums=1)


def states(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states, a value that is not finite in two of the rows, one row of about 2^-126, and weights that bfloat16 does not hold."""
    rng = np.random.default_rng(seed)
    x, weight = cases.normal((*ROWS, SIZE), seed), rng.normal(size=SIZE).astype(np.float32)
    x[1, 2, 3], x[4, 0, 100] = np.inf, np.nan
    x[2, 5] = (rng.integers(0, 0x180, SIZE) | rng.integers(0, 2, SIZE) << 15).astype(np.uint16).view(x.dtype)
    weight[[0, 17, 103]] = 2.0**-127, -(2.0**-130), 2.0**-120
    return x, weight


def projections(size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Every bfloat16 as gate, and as up values of one size, NaN and infinity."""
    up = cases.normal((65536 // size, size), 7, spread=0.0)
    up[3, 1], up[5, 0] = np.nan, -np.inf
    return cases.all_bf16().reshape(-1, size), up


def gradients(function, left, right, cotangent):
    """The two cotangents of a function of two arrays."""
    return jax.jit(lambda left, right, cotangent: jax.vjp(function, left, right)[1](cotangent))(left, right, cotangent)


class RmsNormBase:
    """`rms_norm_fake_quant` against the oracle's norm and rounding, one after the other."""

    implementation: str

    def norm(self, x, weight, fmt, multiplier, guide=None):
        guide = jax.tree.map(jnp.asarray, guide)
        return rms_norm_fake_quant(jnp.asarray(x), jnp.asarray(weight), EPS, fmt, multiplier, guide, implementation=self.implementation)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_norm_rounded_to_the_nearest_code(self, fmt):
        x, weight = states(1)
        normed = oracle.rms_norm(x, weight, np.asarray(inverse_rms(x, EPS)))
        expected = oracle.fake_quant(normed, fmt, MULTIPLIERS[fmt.name])
        assert 16 <= np.isnan(expected.astype(np.float32)).sum() < expected.size / 10
        assert mismatches(self.norm(x, weight, fmt, MULTIPLIERS[fmt.name]), expected) == 0

    @pytest.mark.parametrize(
        ("fmt", "kind"), ((NVFP4, "mantissa"), (NVFP4, "codes"), (MXFP4, "mantissa")), ids=lambda v: getattr(v, "name", v)
    )
    def test_norm_rounded_under_a_record(self, fmt, kind):
        x, weight = states(2)
        normed = oracle.rms_norm(x, weight, np.asarray(inverse_rms(x, EPS)))
        own, rollout = MULTIPLIERS[fmt.name], None if fmt is MXFP4 else np.float32(2.0**-7)
        with np.errstate(all="ignore"):
            guide = random_guide(x, kind, fmt, 3, oracle.quantize(normed, fmt, rollout).scales, rollout)
            expected = oracle.guided_fake_quant(normed, guide, fmt, own)
        assert mismatches(self.norm(x, weight, fmt, own, guide), expected) == 0

    def test_gradient_of_the_norm_passes_through_the_rounding(self):
        x, weight = cases.normal((6, SIZE), 3), states(3)[1]
        cotangent = jnp.asarray(cases.normal(x.shape, 4))
        fused = gradients(lambda x, w: self.norm(x, w, NVFP4, np.float32(0.25)), x, weight, cotangent)
        unfused = gradients(lambda x, w: rule.rms_norm(x, w, rule.inverse_rms(x, EPS)), x, weight, cotangent)
        for gradient, expected in zip(fused, unfused, strict=True):
            assert gradient.dtype == expected.dtype and mismatches(gradient, expected) == 0 and np.asarray(gradient).any()

    def test_norm_under_vmap_scan_and_checkpoint(self):
        x, weight = cases.normal((3, 6, SIZE), 5), states(5)[1]
        multipliers = jnp.asarray([0.25, 0.5, 2.0**-9 * NUDGE], jnp.float32)
        one = lambda x, m: self.norm(x, weight, NVFP4, m)  # noqa: E731
        scan = lambda *xm: jax.lax.scan(lambda carry, xm: (carry, jax.checkpoint(one)(*xm)), None, xm)[1]  # noqa: E731
        mapped, scanned = jax.jit(lambda *xm: (jax.vmap(one)(*xm), scan(*xm)))(jnp.asarray(x), multipliers)
        inverse = np.asarray(inverse_rms(x, EPS))
        expected = oracle.fake_quant(oracle.rms_norm(x, weight, inverse), NVFP4, np.asarray(multipliers)[:, None])
        assert mismatches(mapped, expected) == 0 and mismatches(scanned, expected) == 0


class SwigluBase:
    """`swiglu_fake_quant` against the oracle's."""

    implementation: str

    def swiglu(self, gate, up, fmt, multiplier):
        return swiglu_fake_quant(jnp.asarray(gate), jnp.asarray(up), fmt, multiplier, implementation=self.implementation)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_swiglu_of_every_gate(self, fmt):
        gate, up = projections()
        multiplier = np.float32(2.0**-9 * NUDGE) if fmt.has_multiplier else None
        assert mismatches(self.swiglu(gate, up, fmt, multiplier), oracle.fake_quant(oracle.swiglu(gate, up), fmt, multiplier)) == 0

    def test_swiglu_of_ends_of_rows(self):
        gate, up = (cases.normal((*ROWS, SIZE), seed, spread=0.5) for seed in (1, 2))
        multiplier = MULTIPLIERS["nvfp4"]
        expected = oracle.fake_quant(oracle.swiglu(gate, up), NVFP4, multiplier)
        assert mismatches(self.swiglu(gate, up, NVFP4, multiplier), expected) == 0

    def test_gradient_of_swiglu_passes_through_the_rounding(self):
        gate, up, cotangent = (jnp.asarray(cases.normal((6, SIZE), seed, spread=0.5)) for seed in (3, 4, 5))
        fused = gradients(lambda gate, up: self.swiglu(gate, up, NVFP4, np.float32(0.25)), gate, up, cotangent)
        exact = gradients(lambda gate, up: jax.nn.silu(gate) * up, *(each.astype(jnp.float32) for each in (gate, up, cotangent)))
        for gradient, expected, unfused in zip(fused, exact, gradients(swiglu, gate, up, cotangent), strict=True):
            assert gradient.dtype == jnp.bfloat16 and mismatches(gradient, unfused) == 0
            np.testing.assert_allclose(np.asarray(gradient, np.float32), np.asarray(expected), rtol=2.0**-7, atol=1e-6)


def produced(make, groups):
    """What a source hands to the rounding."""

    def compute(*arrays):
        source = make(*arrays, groups)

        def body(tiles, whole, out_ref):
            blocks = source.octets(source.read(tiles, whole))
            groups.store(out_ref, [[octet.astype(out_ref.dtype) for octet in octets] for octets in blocks])

        (out,) = groups.call(body, [source.tiles], [groups.out(groups.fmt.block, source.dtype)], [source.whole])
        return groups.to_last(out, groups.size)

    return jax.jit(compute)


class SourcesBase:
    """The values before the rounding, which four bits would hide: those of the oracle, every bit."""

    def test_values_of_the_norm(self):
        x, weight = states(6)
        inverse = np.asarray(inverse_rms(x, EPS))
        values = produced(normalized, plan(x.shape, NVFP4, None))(x, weight, inverse)
        assert mismatches(values, oracle.rms_norm(x, weight, inverse)) == 0

    def test_values_of_swiglu(self):
        gate, up = projections()
        expected = oracle.swiglu(gate, up)
        assert mismatches(produced(activated, plan(gate.shape, NVFP4, None))(gate, up), expected) == 0
        assert mismatches(jax.jit(swiglu)(gate, up), expected) == 0
