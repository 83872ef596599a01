"""What every implementation of `quantize`, `dequantize` and `fake_quant` must do. Subclasses name the implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pallas_kernels import MXFP4, NVFP4, Quantized, dequantize, fake_quant, oracle, quantize, unpack_codes
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import BF16, FORMATS, NUDGE, mismatches
from tests.pallas_kernels.strategies import problems


class QuantizeBase:
    """Comparison with the NumPy oracle, bit for bit, and the properties that define the quantizer."""

    implementation: str

    def quantize(self, x, fmt, multiplier=None) -> Quantized:
        return quantize(jnp.asarray(x), fmt, multiplier, implementation=self.implementation)

    def dequantize(self, q: Quantized, dtype=jnp.bfloat16):
        return dequantize(q, dtype, implementation=self.implementation)

    def fake_quant(self, x, fmt, multiplier=None):
        return fake_quant(jnp.asarray(x), fmt, multiplier, implementation=self.implementation)

    def check(self, x, fmt, multiplier=None) -> None:
        """Codes, scales, multiplier and values equal the oracle's; fake_quant equals dequantize of quantize (P1, EXP-20)."""
        expected = oracle.quantize(x, fmt, multiplier)
        q = self.quantize(x, fmt, multiplier)
        assert mismatches(q.codes, expected.codes) == 0
        assert mismatches(q.scales, expected.scales) == 0
        if fmt.has_multiplier:
            assert mismatches(q.multiplier, expected.multiplier) == 0
        values = oracle.dequantize(expected, x.dtype)
        assert mismatches(self.dequantize(q, x.dtype), values) == 0
        assert mismatches(self.fake_quant(x, fmt, multiplier), values) == 0

    def test_golden_vectors(self):
        x, expected = cases.golden()
        q = self.quantize(x, NVFP4, np.float32(2.0**-11 * NUDGE))
        codes = np.asarray(unpack_codes(q.codes, 16))[:, :4]
        lines = [f"{scale:02X}:" + "".join(f"{code:X}" for code in row) for scale, row in zip(q.scales[:, 0], codes, strict=True)]
        assert lines == expected

    # The same test in two classes is intended, not a fixture that changes under hypothesis.
    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(problem=problems())
    def test_equals_oracle(self, problem):
        x, fmt, multiplier = problem
        if x.size or self.implementation == "reference":
            self.check(x, fmt, multiplier)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_exp_10_every_bf16_pattern(self, fmt):
        """Comparisons happen in float32: all 65,536 patterns, NaN and infinities included, as one tensor and under a scale of one."""
        x = cases.all_bf16()
        self.check(x, fmt)
        if fmt.has_multiplier:
            self.check(x, fmt, np.float32(1.0))
        finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), BF16))
        self.check(finite, fmt)

    @pytest.mark.parametrize("dtype", (pytest.param(np.float16, id="float16", marks=pytest.mark.slow), pytest.param(BF16, id="bfloat16")))
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_a_fused_producer_changes_no_byte(self, fmt, dtype):
        """XLA may drop a producer's rounding to its dtype (`xla_allow_excess_precision`); the codes are those of the stored array."""
        a, b = (cases.normal((64, 512), seed, dtype) for seed in (1, 2))
        stored = np.asarray(jax.jit(cases.producer)(a, b))
        for multiplier in (None, np.float32(NUDGE * 2.0**-6)) if fmt.has_multiplier else (None,):
            expected = oracle.quantize(stored, fmt, multiplier)
            q = jax.jit(lambda a, b, m=multiplier: self.quantize(cases.producer(a, b), fmt, m))(a, b)
            assert mismatches(q.codes, expected.codes) == 0 and mismatches(q.scales, expected.scales) == 0
            values = jax.jit(lambda a, b, m=multiplier: self.fake_quant(cases.producer(a, b), fmt, m))(a, b)
            assert mismatches(values, oracle.dequantize(expected, dtype)) == 0

    @pytest.mark.parametrize("dtype", (np.float32, BF16), ids=("float32", "bfloat16"))
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_whole_exponent_range(self, fmt, dtype):
        x = cases.wild((64, 96), 7, dtype)
        self.check(x, fmt)
        if fmt.has_multiplier:
            rows = (2.0 ** np.random.default_rng(8).integers(-126, 118, size=(64,))).astype(np.float32)
            self.check(x, fmt, rows)

    def test_every_threshold_at_every_scale(self):
        x, expected = cases.ladder()
        q = self.quantize(x, NVFP4, np.float32(1.0))
        np.testing.assert_array_equal(np.asarray(q.scales)[:, :, 0], np.arange(1, 0x7F)[:, None].repeat(2, 1))
        np.testing.assert_array_equal(np.asarray(unpack_codes(q.codes, 16)), expected)
        self.check(-x, NVFP4, np.float32(NUDGE))

    def test_mxfp4_ties_go_to_even_codes(self):
        x = np.zeros((1, 32), np.float32)
        x[0, :8] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        q = self.quantize(x, MXFP4)
        assert np.asarray(unpack_codes(q.codes, 32))[0, :8].tolist() == [7, 0, 2, 2, 4, 4, 6, 6]
        assert np.asarray(q.scales).tolist() == [[127]]

    def test_exp_17_every_scale_and_code_decodes(self):
        """Subnormal scales (bytes 1..7) included."""
        scales = np.arange(0x7F, dtype=np.uint8)[:, None]
        codes = np.broadcast_to(oracle.pack_codes(np.arange(16, dtype=np.uint8)), (0x7F, 8))
        for multiplier in (1.0, NUDGE, 2.0**-20 * NUDGE):
            q = Quantized(jnp.asarray(codes), jnp.asarray(scales), jnp.float32(multiplier), 16, NVFP4)
            expected = cases.code_value(np.arange(16)) * oracle.scale_values(scales, NVFP4) * 2.0 ** np.floor(np.log2(multiplier))
            assert mismatches(self.dequantize(q, jnp.float32), np.where(expected == 0, 0.0, expected).astype(np.float32)) == 0

    def test_exp_17_blocks_with_subnormal_scales_round_trip(self):
        for byte in range(1, 8):
            x = np.zeros((1, 16), np.float32)
            x[0, :8] = byte * 2.0**-9 * cases.code_value(np.arange(8))
            q = self.quantize(x, NVFP4, np.float32(1.0))
            assert int(q.scales[0, 0]) == byte
            np.testing.assert_array_equal(np.asarray(self.dequantize(q, jnp.float32)), x)

    def test_every_mxfp4_scale_and_code_decodes(self):
        scales = np.arange(256, dtype=np.uint8)[:, None]
        codes = np.broadcast_to(oracle.pack_codes(np.arange(32, dtype=np.uint8) % 16), (256, 16))
        q = Quantized(jnp.asarray(codes), jnp.asarray(scales), None, 32, MXFP4)
        assert mismatches(self.dequantize(q, jnp.float32), oracle.dequantize(Quantized(codes, scales, None, 32, MXFP4), np.float32)) == 0

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_exp_12_zero_blocks_stay_zero(self, fmt):
        x = np.zeros((2, 64), np.float32)
        x[1, 3] = 1.0
        q = self.quantize(x, fmt)
        assert not np.asarray(q.codes)[0].any() and not np.asarray(q.scales)[0].any()
        out = np.asarray(self.fake_quant(x, fmt))
        assert np.isfinite(out).all() and np.count_nonzero(out) == 1 and 0.9 < out[1, 3] < 1.1
        self.check(np.zeros((2, 64), BF16), fmt)

    def test_exp_09_one_huge_block_among_zeros(self):
        x = np.zeros((1, 16 * 64), BF16)
        x[0, 16] = 3.0e38
        out = np.asarray(self.fake_quant(x, NVFP4)).astype(np.float32)
        assert np.isfinite(out).all() and out[0, 16] > 2.5e38 and np.count_nonzero(out) == 1
        q = self.quantize(x, NVFP4, np.float32(1.0))
        assert int(q.scales[0, 1]) == 0x7E and float(self.dequantize(q)[0, 16]) == 6 * 448

    def test_exp_21_small_block_survives(self):
        x = np.zeros((2, 16), BF16)
        x[0, 0], x[1] = 0.02, np.linspace(-3e-5, 3e-5, 16)
        out = np.asarray(self.fake_quant(x, NVFP4)).astype(np.float32)
        assert (out[1] != 0).sum() > 10
        self.check(x, NVFP4)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("beyond", (pytest.param(-1, marks=pytest.mark.slow), 0, 1))
    def test_sync_05_sizes_around_the_block(self, fmt, beyond):
        size = 2 * fmt.block + beyond
        x = cases.normal((3, size), size)
        q = self.quantize(x, fmt)
        assert q.codes.shape == (3, -(-size // 2)) and q.scales.shape == (3, -(-size // fmt.block))
        assert self.dequantize(q).shape == x.shape
        self.check(x, fmt)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("bad", (np.nan, -np.nan, np.inf, -np.inf))
    def test_p9_non_finite_values_make_their_block_nan(self, fmt, bad):
        x = cases.normal((2, 3 * fmt.block), 9, np.float32)
        x[1, fmt.block + 3] = bad
        multiplier = np.float32(0.25) if fmt.has_multiplier else None
        q = self.quantize(x, fmt, multiplier)
        assert np.asarray(q.scales)[1, 1] == (0x7F if fmt is NVFP4 else 0xFF)
        nan = np.isnan(np.asarray(self.fake_quant(x, fmt, multiplier)))
        assert nan[1, fmt.block : 2 * fmt.block].all() and nan.sum() == fmt.block
        self.check(x, fmt, multiplier)
        self.check(x, fmt)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_p3_symmetries(self, fmt):
        x = cases.normal((8, 96), 3)
        out = np.asarray(self.fake_quant(x, fmt)).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(self.fake_quant(-x, fmt)).astype(np.float32), -out)
        for power in (-40, 5, 31):
            scaled = (x.astype(np.float32) * np.float32(2.0**power)).astype(BF16)
            np.testing.assert_array_equal(np.asarray(self.fake_quant(scaled, fmt)).astype(np.float32), out * np.float32(2.0**power))
        levels = [len(np.unique(block)) for block in out.reshape(-1, fmt.block)]
        assert max(levels) <= 15

    def test_codes_are_never_minus_zero(self):
        x = np.where(np.arange(64) % 2, -1e-3, 1.0).astype(np.float32).reshape(2, 32)
        x[0, 1] = -0.0
        for fmt in FORMATS:
            assert not (np.asarray(unpack_codes(self.quantize(x, fmt).codes, 32)) == 8).any()
            out = np.asarray(self.fake_quant(x, fmt))
            assert not np.signbit(out[out == 0]).any()

    def test_p1_equal_values_in_three_dtypes_give_equal_bytes(self):
        x = (np.random.default_rng(1).integers(-64, 65, size=(4, 64)) / 16).astype(np.float32)
        for fmt in FORMATS:
            first, *others = (self.quantize(x.astype(dtype), fmt) for dtype in (np.float32, BF16, np.float16))
            for other in others:
                assert mismatches(other.codes, first.codes) == 0 and mismatches(other.scales, first.scales) == 0

    def test_foreign_multiplier_is_rounded_in_the_stated_order(self):
        x = cases.normal((16, 96), 5)
        foreign = np.float32(np.abs(x.astype(np.float32)).max() / 2688)
        self.check(x, NVFP4, foreign)

    def test_multiplier_per_row(self):
        x = cases.normal((3, 4, 40), 6)
        rows = oracle.decode_multiplier(np.abs(x.astype(np.float32)).max(-1))
        self.check(x, NVFP4, rows)
        self.check(x, NVFP4, rows[:, :1])
        whole = np.asarray(self.fake_quant(x, NVFP4, rows))
        assert mismatches(self.fake_quant(x[1, 2], NVFP4, rows[1, 2]), whole[1, 2]) == 0

    def test_jit_and_eager_agree(self):
        x = jnp.asarray(cases.normal((8, 96), 4))
        for fmt in FORMATS:
            compiled = jax.jit(lambda x, fmt=fmt: self.fake_quant(x, fmt))(x)
            assert mismatches(compiled, self.fake_quant(x, fmt)) == 0
            if self.implementation == "reference":
                with jax.disable_jit():
                    assert mismatches(self.fake_quant(x, fmt), compiled) == 0

    def test_two_million_values(self):
        """Counted: 2,097,152 bfloat16 values, no code, scale or value differs from the oracle."""
        self.check(cases.normal((2048, 1024), 11, spread=0.5), NVFP4)


class FakeQuantTransformsBase:
    """Gradients and transformations of `fake_quant`."""

    implementation: str

    def fake_quant(self, x, fmt, multiplier=None):
        return fake_quant(x, fmt, multiplier, implementation=self.implementation)

    @pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_p8_gradient_is_the_identity(self, fmt, dtype, key):
        x = (4 * jax.random.normal(key, (4, 50))).astype(dtype)
        weights = jax.random.normal(jax.random.key(1), x.shape).astype(dtype) * jnp.asarray(1e-4, dtype)
        gradient = jax.grad(lambda x: jnp.sum((self.fake_quant(x, fmt) * weights).astype(jnp.float32)))(x)
        assert gradient.dtype == dtype
        assert mismatches(gradient, weights) == 0

    def test_multiplier_gets_no_gradient(self, key):
        x = jax.random.normal(key, (4, 32))
        gradient = jax.grad(lambda m: jnp.sum(self.fake_quant(x, NVFP4, m)))(jnp.float32(0.25))
        assert float(gradient) == 0.0

    def test_under_vmap_scan_and_checkpoint(self, key):
        x = jax.random.normal(key, (3, 4, 48))
        multipliers = jnp.asarray([0.25, 0.5, 2.0**-9 * NUDGE], jnp.float32)
        one = lambda x, m: self.fake_quant(x, NVFP4, m)  # noqa: E731
        expected = [one(x[i], multipliers[i]) for i in range(3)]
        batched = jax.vmap(one)(x, multipliers)
        _, scanned = jax.lax.scan(lambda carry, xm: (carry, jax.checkpoint(one)(*xm)), None, (x, multipliers))
        for i in range(3):
            assert mismatches(batched[i], expected[i]) == 0 and mismatches(scanned[i], expected[i]) == 0

        def loss(x):
            _, out = jax.lax.scan(lambda carry, xm: (carry, jax.checkpoint(one)(*xm)), None, (x, multipliers))
            return jnp.sum(out * out)

        assert mismatches(jax.jit(jax.grad(loss))(x), 2 * batched) == 0
        assert mismatches(jax.grad(lambda x: jnp.sum(jax.vmap(one)(x, multipliers) ** 2))(x), 2 * batched) == 0
