"""The audit's figures on codes made by hand, where every number follows from the definitions."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels import oracle
from tests import tiny_policy as tiny
from trace_jax.evaluation import audit
from trace_jax.evaluation.audit import _compare, audit_metrics, compare_sites
from trace_jax.models.inputs import SiteValues
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.padding import PaddedSite
from trace_jax.train.batches import TrainBatch
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.state import TrainState
from trace_jax.train.update import UpdateSettings

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
    return _compare(SiteValues(before[None], after[None]), record, 0, valid).figures()


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
    assert (result.values, result.equal) == (16, 16)


def test_parts_of_a_batch_add_up():
    """D_act is a ratio of norms over all values, not a mean of ratios."""
    codes = codes_of([2, 3, 7, 5], [1, 9, 4, 0])
    before = E2M1[np.roll(codes, 1)] * np.float32(1.1)
    whole = _compare(SiteValues(before[None], before[None]), site(codes), 0, np.ones((1, 2), bool))
    halves = [
        _compare(SiteValues(before[None, row : row + 1], before[None, row : row + 1]), site(codes[row : row + 1]), 0, np.ones((1, 1), bool))
        for row in (0, 1)
    ]
    assert (halves[0] + halves[1]).figures() == pytest.approx(whole.figures(), nan_ok=True)
    apart = [half.figures()["d_act"] for half in halves]
    assert min(apart) < whole.figures()["d_act"] < max(apart) and np.mean(apart) != pytest.approx(whole.figures()["d_act"])


@pytest.fixture(scope="module")
def audited() -> Trajectories:
    return generate(tiny.engine(tiny.PLANS["nvfp4"], "float32"), tiny.requests(8, audit=True))


def settings(micro_batch_tokens: int, max_length: int = 32) -> UpdateSettings:
    return UpdateSettings(ObjectiveSpec(tiny.policy("float32"), tiny.guided(tiny.PLANS["nvfp4"])), micro_batch_tokens, max_length)


@pytest.mark.slow
def test_micro_batches_hold_no_more_than_train_micro_batch_tokens(audited, monkeypatch):
    """The forward keeps every value of every layer, so a batch beyond the limit is memory beyond the limit."""
    shapes = []

    def observe(params, multipliers, batch: TrainBatch, *, spec):
        shapes.append(batch.tokens.shape)
        return forward(params, multipliers, batch, spec=spec)

    forward = audit._observe
    monkeypatch.setattr(audit, "_observe", observe)
    small, whole = (compare_sites(tiny.params(), tiny.multipliers(), audited, settings(tokens)) for tokens in (64, 4096))
    assert len(shapes) > 2 and all(rows * length <= 64 for rows, length in shapes[:-1])
    assert small.keys() == whole.keys() == {(name, layer) for name in ("expert_input", "k", "v") for layer in tiny.LAYERS}
    for key, one in small.items():
        assert one.values == whole[key].values and one.figures() == pytest.approx(whole[key].figures(), abs=1e-3, nan_ok=True)


def test_answers_of_another_length_compile_nothing_new(audited):
    """The shapes follow from the longest sequence of the run, not of the batch."""
    lengths = audited.lengths()
    state = TrainState(tiny.params(), (), tiny.multipliers())
    compiled = []
    shortest, longest = int(np.argmin(lengths)), int(np.argmax(lengths))
    assert lengths[shortest] <= 24 < lengths[longest]  # alone, each would be padded to a length of its own
    for chosen in (longest, shortest):
        metrics = audit_metrics(settings(64, max_length=int(lengths.max())), state, audited.sequence(chosen), 0)
        assert metrics["guidance/audit/code_agreement/k/layer_0"] > 0.9
        compiled.append(audit._observe._cache_size())  # pyright: ignore[reportAttributeAccessIssue]
    assert compiled[0] == compiled[1]


def test_codes_of_older_weights_are_compared_by_age(audited):
    """Weights that have moved leave the bracket of the recorded code; the figures of the ages together are those of all values."""
    record = audited.audit.record
    of_age = replace(record, version=np.where(np.arange(record.num_tokens) % 3 == 0, 4, 2).astype(np.int32))
    mixed = audited.replace(audit=replace(audited.audit, record=of_age))

    def drifted(leaf):
        return leaf * (1 + 0.02 * np.sin(np.arange(leaf.size)).reshape(leaf.shape)).astype(np.float32)

    moved = jax.tree.map(drifted, tiny.params())
    name = "guidance/audit/outside_bracket_fraction/expert_input/layer_1"
    for params, drifts in ((tiny.params(), False), (moved, True)):
        metrics = audit_metrics(settings(4096), TrainState(params, (), tiny.multipliers()), mixed, 4)
        shares = {key.removeprefix(name): value for key, value in metrics.items() if key.startswith(name)}
        assert set(shares) == {"", "/gap_0", "/gap_2"} and (shares[""] > 0.001) == drifts
        valid, new = record.valid, of_age.version == 4
        weights = np.sum(valid & new) / np.sum(valid)
        assert shares[""] == pytest.approx(weights * shares["/gap_0"] + (1 - weights) * shares["/gap_2"], rel=1e-6)
        equal, new_equal, old_equal = (
            metrics[f"guidance/audit/code_agreement/expert_input/layer_1{age}"] for age in ("", "/gap_0", "/gap_2")
        )
        assert equal == pytest.approx(weights * new_equal + (1 - weights) * old_equal, rel=1e-6) and (equal < 0.99) == drifts
    same = audit_metrics(settings(4096), TrainState(moved, (), tiny.multipliers()), audited, int(record.version[0]))
    assert not [key for key in same if "gap_" in key]
