"""What every implementation of `guided_fake_quant` must do. Subclasses name the implementation.

T1 to T7 are the properties of guided rounding listed in docs/numerics.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import NVFP4, Guide, fake_quant, guided_fake_quant, mantissa_bits, oracle, quantize
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import FORMATS, NUDGE, mismatches
from tests.pallas_kernels.strategies import problems

KINDS = ("scales", "mantissa", "codes")
UNIT_SCALE = {"nvfp4": 0x38, "mxfp4": 127}


def record(q, kind: str, valid=True, multiplier=None) -> Guide:
    """A guide made from the rollout's own quantization."""
    data = {"scales": None, "mantissa": mantissa_bits(q.codes, q.size), "codes": q.codes}[kind]
    return Guide(kind, data, q.scales, multiplier, jnp.asarray(valid))


def random_guide(x, kind: str, fmt, seed: int, scales=None, multiplier=None) -> Guide:
    """Arbitrary bytes as a record, and rows without one among them."""
    rows, size = x.shape[:-1], x.shape[-1]
    width = {"scales": None, "mantissa": -(-size // 8), "codes": -(-size // 2)}[kind]
    data = None if width is None else cases.random_bytes((*rows, width), seed)
    if scales is None:
        scales = cases.random_bytes((*rows, fmt.scales_bytes(size)), seed + 1)
    return Guide(kind, data, scales, multiplier, np.random.default_rng(seed).random(rows) < 0.75)


class GuidedBase:
    """Comparison with the NumPy oracle, bit for bit, and the properties of guided rounding."""

    implementation: str

    def guided(self, x, guide, fmt, multiplier):
        return guided_fake_quant(jnp.asarray(x), jax.tree.map(jnp.asarray, guide), fmt, multiplier, implementation=self.implementation)

    def check_guided(self, x, guide, fmt, multiplier) -> None:
        with np.errstate(all="ignore"):
            expected = oracle.guided_fake_quant(x, guide, fmt, multiplier)
        assert mismatches(self.guided(x, guide, fmt, multiplier), expected) == 0

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # one test in several classes, as intended
    @given(problem=problems(), kind=st.sampled_from(KINDS), own_scales=st.booleans(), seed=st.integers(0, 2**31))
    def test_equals_oracle_for_arbitrary_records(self, problem, kind, own_scales, seed):
        x, fmt, multiplier = problem
        if not x.size:
            return
        rollout = np.float32(2.0**-6 * NUDGE) if fmt.has_multiplier else None
        scales = oracle.quantize(x, fmt, rollout).scales if own_scales else None
        self.check_guided(x, random_guide(x, kind, fmt, seed, scales, rollout), fmt, multiplier)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_guided_whole_exponent_range_and_non_finite_values(self, fmt, kind):
        for seed, x in enumerate((cases.all_bf16(), cases.wild((64, 96), 3))):
            rows = (2.0 ** np.random.default_rng(seed).integers(-126, 118, size=x.shape[:-1])).astype(np.float32)
            multiplier = rows if fmt.has_multiplier else None
            self.check_guided(x, random_guide(x, kind, fmt, seed, multiplier=multiplier), fmt, multiplier)

    def sweep(self, kind: str, fmt=NVFP4):
        """(z, code, chosen value): magnitudes on, beside and between the codes against every recorded code, at scale one."""
        grid = np.concatenate([np.linspace(-8, 8, 1025), np.array([2.4, -2.4, 5.999, 6.001])]).astype(np.float32)
        edges = np.array([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32)
        edges = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 9, dtype=np.float32)])
        z = np.concatenate([grid, edges, -edges])
        z = np.pad(z, (0, -len(z) % fmt.block))
        x = np.broadcast_to(z, (16, len(z)))
        codes = np.broadcast_to(np.arange(16, dtype=np.uint8)[:, None], x.shape)
        packed = oracle.pack_codes(codes)
        data = packed if kind == "codes" else oracle.mantissa_bits(packed, len(z)) if kind == "mantissa" else None
        scales = np.full((16, fmt.scales_bytes(len(z))), UNIT_SCALE[fmt.name], np.uint8)
        guide = Guide(kind, data, scales, None, np.ones(16, bool))
        out = self.guided(x, guide, fmt, np.float32(NUDGE) if fmt.has_multiplier else None)
        return x, codes, np.asarray(out)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_t1_full_record_is_never_worse_than_rounding(self, fmt):
        _, codes, full = self.sweep("codes", fmt)
        _, _, plain = self.sweep("scales", fmt)
        target = cases.code_value(codes)
        assert (np.abs(full - target) <= np.abs(plain - target)).all()
        assert (np.abs(full - target) < np.abs(plain - target)).any()

    def test_t1_one_bit_can_be_worse_outside_the_bracket(self):
        x, codes, one_bit = self.sweep("mantissa")
        _, _, plain = self.sweep("scales")
        target = cases.code_value(codes)
        worse = np.abs(one_bit - target) > np.abs(plain - target)
        assert worse.any()
        # z = 2.4 with the recorded 1.5: the bracket is {2, 3}, and the odd one is 3.
        assert one_bit[3][x[3] == np.float32(2.4)].tolist() == [3.0] and worse[3][x[3] == np.float32(2.4)].all()

    def test_t2_one_bit_equals_full_inside_the_bracket(self):
        x, codes, one_bit = self.sweep("mantissa")
        _, _, full = self.sweep("codes")
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        lower = np.minimum((np.abs(x)[..., None] >= values[1:]).sum(-1), 6)
        target = cases.code_value(codes) * np.where(np.signbit(x), -1, 1)
        inside = (target == values[lower]) | (target == values[lower + 1])
        on_code = np.isin(np.abs(x), values[:7])
        assert (inside & ~on_code).sum() > 1000
        assert (one_bit == full)[inside | on_code].all()

    def test_clipped_values_choose_between_four_and_six(self):
        x, _, full = self.sweep("codes")
        large = np.abs(x) >= 6
        assert set(np.unique(np.abs(full[large]))) == {4.0, 6.0}

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("nudged", (True, False))
    def test_t3_the_same_input_reproduces_the_rollout(self, fmt, kind, nudged):
        if nudged and not fmt.has_multiplier:
            nudged = False
        x = cases.normal((64, 200), 33)
        amax = np.abs(x.astype(np.float32)).max()
        multiplier = oracle.decode_multiplier(amax, nudged=nudged) if fmt.has_multiplier else None
        q = quantize(jnp.asarray(x), fmt, multiplier)
        rolled = oracle.dequantize(oracle.quantize(x, fmt, multiplier), x.dtype)
        assert mismatches(self.guided(x, record(q, kind), fmt, multiplier), rolled) == 0

    def test_t3_two_million_values(self):
        """Counted: 2,097,152 values on a coarse grid (many ties), mantissa record, no value differs."""
        x = (cases.normal((2048, 1024), 12, np.float32, spread=0) * 8).round() / 8
        x = x.astype(cases.BF16)
        q = quantize(jnp.asarray(x), NVFP4, np.float32(2.0**-6))
        rolled = oracle.dequantize(oracle.quantize(x, NVFP4, np.float32(2.0**-6)), x.dtype)
        assert mismatches(self.guided(x, record(q, "mantissa"), NVFP4, np.float32(2.0**-6)), rolled) == 0

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_rows_without_a_record_are_rounded_with_their_own_scale(self, fmt):
        x = cases.normal((6, 80), 2)
        own, rollout = (np.float32(0.25), np.float32(0.5 * NUDGE)) if fmt.has_multiplier else (None, None)
        valid = np.array([True, False, True, True, False, False])
        guide = random_guide(x, "mantissa", fmt, 4, oracle.quantize(x, fmt, rollout).scales, rollout)
        guide = Guide("mantissa", guide.data, guide.scales, rollout, valid)
        out = np.asarray(self.guided(x, guide, fmt, own))
        assert mismatches(out[~valid], np.asarray(fake_quant(jnp.asarray(x), fmt, own))[~valid]) == 0
        self.check_guided(x, guide, fmt, own)
        never = Guide("mantissa", guide.data, guide.scales, rollout, np.bool_(False))
        assert mismatches(self.guided(x, never, fmt, own), fake_quant(jnp.asarray(x), fmt, own)) == 0

    def test_zero_scale_and_bad_scale_bytes(self):
        x = cases.normal((2, 32), 5)
        scales = np.array([[0x00, 0x38], [0x7F, 0x80]], np.uint8)
        out = np.asarray(self.guided(x, random_guide(x, "codes", NVFP4, 1, scales), NVFP4, np.float32(1.0)).astype(jnp.float32))
        guide = Guide("codes", cases.random_bytes((2, 16), 2), scales, None, np.ones(2, bool))
        out = np.asarray(self.guided(x, guide, NVFP4, np.float32(1.0)).astype(jnp.float32))
        assert not out[0, :16].any() and np.isfinite(out[0]).all() and np.isnan(out[1]).all()

    def test_exact_zero_stays_zero(self):
        x = np.zeros((1, 32), np.float32)
        for kind in KINDS:
            guide = Guide(kind, random_guide(x, kind, NVFP4, 3).data, np.full((1, 2), 0x40, np.uint8), None, np.bool_(True))
            out = np.asarray(self.guided(x, guide, NVFP4, np.float32(1.0)))
            assert not out.any() and not np.signbit(out).any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_p9_guided_non_finite_input_is_not_absorbed(self, kind):
        x = cases.normal((2, 48), 5, np.float32)
        x[0, 20], x[1, 0] = np.nan, -np.inf
        guide = random_guide(x, kind, NVFP4, 6, np.full((2, 3), 0x38, np.uint8))
        nan = np.isnan(np.asarray(self.guided(x, guide, NVFP4, np.float32(1.0))))
        assert nan.reshape(2, 3, 16).all(-1).tolist() == [[False, True, False], [True, False, False]] and nan.sum() == 32

    def test_t7_minus_zero_in_the_record_is_zero(self):
        x = cases.normal((4, 32), 8, np.float32)
        scales = np.full((4, 2), 0x38, np.uint8)
        outs = [
            self.guided(x, Guide("codes", np.full((4, 16), byte, np.uint8), scales, None, np.bool_(True)), NVFP4, np.float32(1.0))
            for byte in (0x00, 0x88)
        ]
        assert mismatches(*outs) == 0

    @pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
    @pytest.mark.parametrize("kind", KINDS)
    def test_t5_gradient_is_the_identity(self, kind, dtype):
        """Also outside +-6 scale, and for rows without a record."""
        x = jnp.asarray(cases.normal((4, 50), 1, np.float32)).astype(dtype) * jnp.asarray(20, dtype)
        guide = jax.tree.map(jnp.asarray, random_guide(x, kind, NVFP4, 9, np.full((4, 4), 0x38, np.uint8)))
        weights = jax.random.normal(jax.random.key(1), x.shape).astype(dtype) * jnp.asarray(1e-4, dtype)

        def loss(x, multiplier):
            out = guided_fake_quant(x, guide, NVFP4, multiplier, implementation=self.implementation)
            return jnp.sum((out * weights).astype(jnp.float32))

        gradient, for_multiplier = jax.grad(loss, argnums=(0, 1))(x, jnp.float32(1.0))
        assert gradient.dtype == dtype and mismatches(gradient, weights) == 0 and float(for_multiplier) == 0.0

    def test_guided_under_vmap_scan_and_checkpoint(self):
        x = cases.normal((3, 4, 40), 2, np.float32)
        guide = jax.tree.map(jnp.asarray, random_guide(x, "mantissa", NVFP4, 5, np.full((3, 4, 3), 0x30, np.uint8)))
        multiplier = jnp.float32(0.5)
        expected = self.guided(x, guide, NVFP4, multiplier)

        def one(x, data, scales, valid):
            piece = Guide("mantissa", data, scales, None, valid)
            return guided_fake_quant(x, piece, NVFP4, multiplier, implementation=self.implementation)

        leaves = (jnp.asarray(x), guide.data, guide.scales, guide.valid)
        assert mismatches(jax.vmap(one)(*leaves), expected) == 0

        def loss(x):
            _, out = jax.lax.scan(lambda carry, piece: (carry, jax.checkpoint(one)(*piece)), None, (x, *leaves[1:]))
            return jnp.sum(out * out), out

        gradient, out = jax.jit(jax.grad(loss, has_aux=True))(leaves[0])
        assert mismatches(out, expected) == 0 and mismatches(gradient, 2 * expected) == 0

    def test_multipliers_per_row(self):
        x = cases.normal((3, 4, 40), 3)
        q = oracle.quantize(x, NVFP4, np.float32(0.25))
        rollout = (2.0 ** np.arange(-4, -1).astype(np.float32) * np.float32(NUDGE)).reshape(3, 1)
        own = np.full((3, 4), 0.125, np.float32)
        self.check_guided(x, random_guide(x, "codes", NVFP4, 2, q.scales, rollout), NVFP4, own)
