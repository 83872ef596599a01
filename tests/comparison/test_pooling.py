"""Several seeds as one: intervals by hand, means and medians, and the curves."""

from __future__ import annotations

import math

import pytest

from tests.comparison.made_runs import evaluation
from trace_jax.comparison.pooling import mean_run, medians, pooled_rate
from trace_jax.evaluation.pass_rate import Z, effective_answers, wilson
from trace_jax.report.series import Run


def rate(value: float, answers: float) -> dict[str, float]:
    low, high = wilson(value, answers)
    return {"pass_at_1": value, "low": low, "high": high, "reward_mean": value / 2}


@pytest.mark.parametrize("value", [0.0, 0.01, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("answers", [1.0, 6.5, 512.0, 1e6])
def test_the_answers_behind_an_interval(value: float, answers: float) -> None:
    assert effective_answers(value, *wilson(value, answers)) == pytest.approx(answers, rel=1e-6)


def test_an_interval_without_width_is_exact_knowledge() -> None:
    assert effective_answers(0.3, 0.3, 0.3) == math.inf and wilson(0.3, math.inf) == (0.3, 0.3)


def test_two_seeds_by_hand() -> None:
    """3 of 10 and 5 of 10 are 8 of 20: centre (0.4 + z^2/40) / (1 + z^2/20), half width by Wilson's formula."""
    pooled = pooled_rate([rate(0.3, 10), rate(0.5, 10)])
    centre = (0.4 + Z**2 / 40) / (1 + Z**2 / 20)
    half = Z / (1 + Z**2 / 20) * math.sqrt(0.4 * 0.6 / 20 + Z**2 / 1600)
    assert pooled == pytest.approx({"pass_at_1": 0.4, "low": centre - half, "high": centre + half, "reward_mean": 0.2, "seeds": 2})
    assert pooled is not None and (round(pooled["low"], 3), round(pooled["high"], 3)) == (0.219, 0.613)


def test_one_seed_keeps_its_interval_and_none_has_none() -> None:
    assert pooled_rate([rate(0.25, 40)]) == pytest.approx(rate(0.25, 40) | {"seeds": 1}) and pooled_rate([]) is None


def test_medians_of_what_is_there() -> None:
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 9.0}, {"a": 2.0, "c": 3.0}]) == {"a": 2.0, "b": 5.0, "c": 3.0}


def test_the_curve_of_a_method_is_the_mean_of_its_seeds() -> None:
    first = [{"step": 0} | evaluation(0.3), {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    second = [{"step": 0} | evaluation(0.5), {"step": 1, "loss": 3.0}]
    run = mean_run("trace", [Run("a", first, {"method": "trace"}), Run("b", second)], "validation")
    assert (run.name, run.config) == ("trace", {"method": "trace"})
    assert [(row["step"], row.get("loss")) for row in run.rows] == [(0, None), (1, 2.0), (2, 2.0)]
    low, high = wilson(0.4, 80)
    shown = {name: run.rows[0][f"eval/validation/{name}"] for name in ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "precision")}
    assert shown == {
        "pass_at_1": pytest.approx(0.4),
        "pass_at_1_low": pytest.approx(low),
        "pass_at_1_high": pytest.approx(high),
        "precision": "nvfp4",
    }
