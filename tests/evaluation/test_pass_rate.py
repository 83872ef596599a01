"""Pass rates: hand-computed intervals, clustering of answers to one prompt, and verifier errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trace_jax.evaluation.pass_rate import pass_interval


def column(*values):
    return np.asarray(values, bool)[:, None]


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
    """Two prompts solved always, two never: the interval is that of 4 prompts, not of 4 x 50 answers."""
    correct = np.repeat(column(True, True, False, False), 50, axis=1)
    rate, low, high = pass_interval(correct, np.ones_like(correct))
    error = 1.959964 * math.sqrt(1 / 3) / 2
    assert (rate, low, high) == pytest.approx((0.5, max(0, 0.5 - error), min(1, 0.5 + error)))


def test_several_answers_by_hand():
    """Means 1, 1/2, 1/2, 0: standard deviation sqrt(1/6), error z x sqrt(1/6) / 2."""
    correct = np.asarray([[1, 1], [1, 0], [0, 1], [0, 0]], bool)
    rate, low, high = pass_interval(correct, np.ones_like(correct))
    error = 1.959964 * math.sqrt(1 / 6) / 2
    assert (rate, low, high) == pytest.approx((0.5, 0.5 - error, 0.5 + error))


def test_verifier_errors_are_not_wrong_answers():
    correct = np.asarray([[1, 0], [1, 1], [0, 0]], bool)
    verified = np.asarray([[1, 0], [1, 1], [0, 0]], bool)
    rate, low, high = pass_interval(correct, verified)
    assert (rate, low, high) == (1.0, 1.0, 1.0)  # both prompts that have a verdict are solved; the third has none
    assert pass_interval(column(True, False, True), column(True, True, False))[0] == 0.5


def test_an_unverified_correct_flag_does_not_count():
    assert pass_interval(np.asarray([[1, 1]], bool), np.asarray([[0, 1]], bool))[0] == 1.0
    assert pass_interval(np.asarray([[1, 0]], bool), np.asarray([[0, 1]], bool))[0] == 0.0


def test_nothing_verified():
    assert all(math.isnan(value) for value in pass_interval(column(True, False), column(False, False)))


def test_one_prompt_with_several_answers_says_nothing():
    assert pass_interval(np.asarray([[1, 0]], bool), np.ones((1, 2), bool)) == (0.5, 0.0, 1.0)
