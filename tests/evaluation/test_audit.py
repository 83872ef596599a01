"""The audit's figures on codes made by hand, where every number follows from the definitions."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import oracle
from trace_jax.evaluation.audit import _compare
from trace_jax.models.inputs import SiteValues
from trace_jax.rollout.padding import PaddedSite

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ONE = {"nvfp4": 0x38, "mxfp4": 0x7F}
"""Byte of a block scale of 1: E4M3 and E8M0."""


def site(codes: np.ndarray, block_format: str = "nvfp4", scale: int | None = None, multiplier: float | list[float] = 1.0) -> PaddedSite:
    """One layer, one sequence, rows of codes; every block has one scale."""
    rows, size = codes.shape
    block = 16 if block_format == "nvfp4" else 32
    packed = oracle.pack_codes(codes.astype(np.uint8))
    scales = np.full((1, 1, rows, -(-size // block)), ONE[block_format] if scale is None else scale, np.uint8)
    factor = None if block_format == "mxfp4" else np.asarray(multiplier, np.float32).reshape(1, *([1, -1] if np.ndim(multiplier) else []))
    return PaddedSite(block_format, block, size, np.zeros(1, np.int32), packed[None, None], scales, factor)


def figures(before, after, record: PaddedSite, valid=None) -> dict[str, float]:
    before, after = np.asarray(before, np.float32), np.asarray(after, np.float32)
    valid = np.ones((1, before.shape[0]), bool) if valid is None else valid
    result = _compare(SiteValues(before[None], after[None]), record, 0, valid)
    return {name: float(metric.mean()) for name, metric in vars(result).items()}


def codes_of(*rows):
    return np.asarray([list(row) + [0] * (16 - len(row)) for row in rows], np.uint8)


@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
def test_exact_replay(block_format):
    codes = np.tile(np.arange(16, dtype=np.uint8), (3, 2))
    values = E2M1[codes]
    found = figures(values, values, site(codes, block_format))
    assert (found["code_agreement"], found["d_act"], found["outside_bracket_fraction"]) == (1.0, 0.0, 0.0)
    assert np.isnan(found["adjacent_share"])  # no value is rounded to another code


def test_figures_by_hand():
    """16 values with scale 1: three of them differ by one code, one by two, the rest are zero on both sides."""
    codes = codes_of([2, 3, 7, 5])  # the rollout has 1, 1.5, 6, 3
    before = np.zeros((1, 16))
    before[0, :4] = [1.3, 1.2, 4.4, 1.9]  # to nearest: 1.5 (code 3), 1 (code 2), 4 (code 6), 2 (code 4)
    after = np.zeros((1, 16))
    after[0, :4] = [1.5, 1.0, 4.0, 2.0]
    found = figures(before, after, site(codes))
    assert found["code_agreement"] == pytest.approx(12 / 16)
    assert found["adjacent_share"] == pytest.approx(1.0)
    # 1.3 lies between 1 and 1.5, 1.2 too, 4.4 between 4 and 6; 1.9 between 1.5 and 2, so 3 is out of reach.
    assert found["outside_bracket_fraction"] == pytest.approx(1 / 16)
    assert found["d_act"] == pytest.approx(np.sqrt(0.25 + 0.25 + 4 + 1) / np.sqrt(1 + 2.25 + 36 + 9))


def test_two_codes_apart_is_not_adjacent():
    codes = codes_of([2, 3])
    before = np.zeros((1, 16))
    before[0, :2] = [2.1, 1.1]  # to nearest 2 (code 4; rollout 2) and 1 (code 2; rollout 3)
    found = figures(before, before, site(codes))
    assert found["adjacent_share"] == pytest.approx(0.5)


def test_the_other_sign_is_outside_the_bracket_except_at_zero():
    codes = codes_of([10, 8, 0, 1])  # -1, -0, 0, 0.5
    before = np.zeros((1, 16))
    before[0, :4] = [0.9, 0.2, -0.2, -0.1]
    found = figures(before, before, site(codes))
    assert found["outside_bracket_fraction"] == pytest.approx(2 / 16)  # -1 for 0.9, and 0.5 for -0.1


def test_saturated_values_belong_to_the_last_bracket():
    codes = codes_of([7, 6, 15])
    before = np.zeros((1, 16))
    before[0, :3] = [100.0, 6.0, -9.0]
    found = figures(before, before, site(codes))
    assert found["outside_bracket_fraction"] == 0
    assert found["adjacent_share"] == 1.0  # only code 6 for 6.0 differs, by one


def test_a_shifted_record_is_far_from_the_values():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 32), dtype=np.uint8)
    values = E2M1[codes]
    found = figures(values, values, site(np.roll(codes, 1, axis=0)))
    assert found["code_agreement"] < 0.3 and found["d_act"] > 1 and found["outside_bracket_fraction"] > 0.5
    assert found["adjacent_share"] < 0.3


def test_scale_and_multiplier_enter_as_powers_of_two():
    """Scale byte 0x40 is 2; a multiplier of 0.3 decodes as 2^-2, one of 2^-3 as itself. Per token and static."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, 1))
    static = E2M1[codes] * np.float32(0.5)
    assert figures(static, static, site(codes, scale=0x40, multiplier=0.3))["code_agreement"] == 1
    per_token = E2M1[codes] * np.asarray([[0.5], [0.25]], np.float32)
    assert figures(per_token, per_token, site(codes, scale=0x40, multiplier=[0.3, 0.125]))["code_agreement"] == 1
    assert figures(static, static, site(codes, scale=0x40, multiplier=0.125))["code_agreement"] < 0.2


def test_blocks_of_zero_scale():
    codes = np.zeros((1, 16), np.uint8)
    found = figures(np.full((1, 16), 1e-30), np.zeros((1, 16)), site(codes, scale=0))
    assert (found["code_agreement"], found["d_act"], found["outside_bracket_fraction"]) == (1.0, 0.0, 0.0)


def test_rows_without_a_record_are_left_out():
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, 1))
    values = E2M1[codes].copy()
    values[1] = 123
    valid = np.asarray([[True, False]])
    result = _compare(SiteValues(values[None], values[None]), site(codes), 0, valid)
    assert result.code_agreement.count == 16 and float(result.code_agreement.mean()) == 1
