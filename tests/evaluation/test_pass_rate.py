"""Pass rates: hand-computed intervals, clustering of answers to one prompt, and verifier errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trace_jax.evaluation.pass_rate import Z, wilson
from trace_jax.evaluation.pass_rate import pass_interval as interval_of_answers


def column(*values):
    return np.asarray(values, bool)[:, None]


def pass_interval(correct, verified):
    """Of a row of answers per prompt."""
    return interval_of_answers(correct.reshape(-1), verified.reshape(-1), np.repeat(np.arange(len(correct)), correct.shape[1]))


def score_ends(rate, n):
    """Where a true rate m is just rejected: (rate - m)^2 = z^2 m (1 - m) / n."""
    return tuple(sorted(np.roots([1 + Z**2 / n, -2 * rate - Z**2 / n, rate**2])))


def test_wilson_by_hand():
    """7 of 10: centre (0.7 + 0.19207) / 1.38415, half width 1.959964 / 1.38415 x sqrt(0.021 + 0.0096036)."""
    correct = column(*[True] * 7, *[False] * 3)
    rate, low, high = pass_interval(correct, np.ones_like(correct))
    assert rate == pytest.approx(0.7)
    assert (low, high) == pytest.approx((0.396777, 0.892211), abs=2e-5)


@pytest.mark.parametrize(("value", "expected"), [(False, (0.0, 0.0, 0.277533)), (True, (1.0, 0.722467, 1.0))])
def test_wilson_at_the_ends_stays_open_on_one_side(value, expected):
    """0 of 10: z^2 / (n + z^2) = 3.841459 / 13.841459."""
    correct = np.full((10, 1), value)
    assert pass_interval(correct, np.ones_like(correct)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("value", [False, True])
def test_no_interval_leaves_the_unit_range(value):
    for n in range(1, 200):
        correct = np.full((n, 1), value)
        _, low, high = pass_interval(correct, np.ones_like(correct))
        assert 0 <= low <= high <= 1


def test_answers_to_one_prompt_are_not_independent():
    """Two prompts solved always, two never: the interval is that of 4 answers, not of 4 x 50."""
    correct = np.repeat(column(True, True, False, False), 50, axis=1)
    assert pass_interval(correct, np.ones_like(correct)) == pytest.approx((0.5, *score_ends(0.5, 4)))


def test_several_answers_by_hand():
    """Means 1, 1/2, 1/2, 0 vary by 1/6, so their mean as that of 4 x (1/4) / (1/6) = 6 independent answers of 8."""
    correct = np.asarray([[1, 1], [1, 0], [0, 1], [0, 0]], bool)
    assert pass_interval(correct, np.ones_like(correct)) == pytest.approx((0.5, *score_ends(0.5, 6)))


@pytest.mark.parametrize(("right", "effective"), [(8, 4), (0, 4), (4, 32)])
def test_equal_prompts_have_an_interval_too(right, effective):
    """All right or none: each prompt counts once. Half right at every prompt: no more than the 32 answers."""
    correct = np.tile(np.arange(8) < right, (4, 1))
    rate, low, high = pass_interval(correct, np.ones_like(correct))
    assert (rate, low, high) == pytest.approx((right / 8, *score_ends(right / 8, effective)))
    assert high - low > 0.3


@pytest.mark.parametrize("alike", [0.2, 2.0, 1e6])
def test_the_interval_holds_the_true_rate(alike):
    """95 % of 400 evaluations of 32 prompts x 8 answers, whose rates spread much (0.2) or not at all (1e6) around 0.3."""
    rng = np.random.default_rng(0)
    held = counted_alone = 0
    for rates in rng.beta(0.3 * alike, 0.7 * alike, (400, 32)):
        correct = rng.random((32, 8)) < rates[:, None]
        rate, low, high = pass_interval(correct, np.ones_like(correct))
        held += low <= 0.3 <= high
        low, high = wilson(rate, correct.size)
        counted_alone += low <= 0.3 <= high
    assert 0.92 <= held / 400 <= 0.985
    assert (counted_alone / 400 < 0.7) == (alike < 1)  # answers taken for independent: far too narrow where prompts differ


def test_groups_may_be_in_any_order_and_of_any_size():
    correct, verified = np.asarray([1, 0, 0, 1, 1], bool), np.ones(5, bool)
    rate = interval_of_answers(correct, verified, np.asarray([7, 2, 7, 2, 2]))[0]
    assert rate == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_verifier_errors_are_not_wrong_answers():
    correct = np.asarray([[1, 0], [1, 1], [0, 0]], bool)
    verified = np.asarray([[1, 0], [1, 1], [0, 0]], bool)
    assert pass_interval(correct, verified) == pytest.approx(
        (1.0, *score_ends(1.0, 2))
    )  # both prompts that have a verdict are solved; the third has none
    assert pass_interval(column(True, False, True), column(True, True, False))[0] == 0.5


def test_an_unverified_correct_flag_does_not_count():
    assert pass_interval(np.asarray([[1, 1]], bool), np.asarray([[0, 1]], bool))[0] == 1.0
    assert pass_interval(np.asarray([[1, 0]], bool), np.asarray([[0, 1]], bool))[0] == 0.0


def test_nothing_verified():
    assert all(math.isnan(value) for value in pass_interval(column(True, False), column(False, False)))


def test_one_prompt_with_several_answers_counts_once():
    assert pass_interval(np.asarray([[1, 0]], bool), np.ones((1, 2), bool)) == pytest.approx((0.5, *score_ends(0.5, 1)))
