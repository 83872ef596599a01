"""Can the model move to FP4? The pass rate decides first, then the gap of each method, by stated limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trace_jax.evaluation.mismatch_verdict import RISKY, SMALL, gap_size, judge
from trace_jax.evaluation.pass_rate import pass_interval


def entry(right: int, of: int = 64, /, **gaps: str) -> dict[str, Any]:
    """A precision at which `right` of `of` answers were right."""
    correct = np.arange(of) < right
    rate, low, high = pass_interval(correct, np.ones_like(correct), np.arange(of))
    methods = {name: {"gap": gap} for name, gap in gaps.items()}
    return {"prompts": of, "pass_at_1": rate, "pass_at_1_low": low, "pass_at_1_high": high, "methods": methods}


def test_limits_belong_to_the_better_side() -> None:
    values = (SMALL, SMALL + 1e-6, RISKY, RISKY + 1e-6, float("inf"), float("nan"))
    assert [gap_size(value) for value in values] == ["small", "risky", "risky", "large", "large", "large"]


def test_a_destroyed_model_is_no_however_small_the_gap() -> None:
    found = judge("mxfp4", entry(0, naive="small", trace="small"), entry(24))
    assert found["verdict"] == "no"
    assert found["answer"].startswith("mxfp4: no, with any method: pass@1 0.000 against bf16's 0.375 is a loss.")


@pytest.mark.parametrize(
    ("gaps", "verdict", "answer"),
    [
        (
            {"naive": "large", "trace": "small", "trace_full": "small"},
            "yes",
            "nvfp4: yes with trace or trace_full; no with naive (pass@1 0.344 against bf16's 0.375). Next: train with method=trace.",
        ),
        (
            {"naive": "large", "qat": "risky"},
            "risky",
            "nvfp4: risky with qat; no with naive (pass@1 0.344 against bf16's 0.375). Next: measure what follows "
            "the rollout more closely (--methods quads,trace_scales,trace,trace_full), or keep the rollout in bf16.",
        ),
        ({"naive": "large"}, "no", "nvfp4: no with naive (pass@1 0.344"),
    ],
)
def test_without_a_loss_the_gap_decides(gaps: dict[str, str], verdict: str, answer: str) -> None:
    found = judge("nvfp4", entry(22, 64, **gaps), entry(24))
    assert found["verdict"] == verdict and found["answer"].startswith(answer)


def test_only_intervals_apart_are_a_loss() -> None:
    """24 of 64: low end 0.267. 9 of 64 reach up to 0.246, 11 of 64 up to 0.282."""
    verdicts = [judge("nvfp4", entry(right, trace="small"), entry(24))["verdict"] for right in (9, 11)]
    assert verdicts == ["no", "yes"]


@pytest.mark.parametrize(
    ("below", "reference", "why"),
    [
        (entry(20, trace="small", naive="large"), None, "bf16 was not measured"),
        (entry(0, 8, trace="small", naive="large"), entry(3, 8), "bf16's pass@1 0.375 is too uncertain to show a loss"),
        (entry(0, trace="small", naive="large"), entry(0), "bf16's pass@1 0.000 is too uncertain to show a loss"),
        (entry(20, trace="small", naive="large") | {"pass_at_1": math.nan}, entry(24), "no answer could be verified"),
    ],
)
def test_what_cannot_be_judged_is_not_called_safe(below: dict[str, Any], reference: dict[str, Any] | None, why: str) -> None:
    found = judge("nvfp4", below, reference)
    assert found["verdict"] == "unknown" and found["answer"].startswith(f"nvfp4: cannot be judged, {why}")
    assert found["answer"].endswith("Gap: small with trace; large with naive.")


OVERRIDES = "rollout.weights=mxfp4 rollout.activations=mxfp4 rollout.kv_cache.k=mxfp4 rollout.kv_cache.v=mxfp4"
CLOSER = "measure what follows the rollout more closely (--methods {}), or keep the rollout in bf16."


@pytest.mark.parametrize(
    ("precision", "gaps", "overrides", "step"),
    [
        ("mxfp4", {"naive": "large", "trace": "small"}, OVERRIDES, f"train with method=trace {OVERRIDES}."),
        ("nvfp4", {"naive": "large", "trace": "small"}, "", "train with method=trace."),
        ("fp8", {"naive": "risky"}, "", CLOSER.format("qat")),
        ("fp8", {"naive": "large", "qat": "risky"}, "", "keep the rollout in bf16."),
        (
            "nvfp4",
            {"trace": "risky"},
            "",
            CLOSER.format("trace_full"),
        ),
        ("nvfp4", {"trace_full": "risky"}, "", "keep the rollout in bf16."),
    ],
)
def test_the_next_step_can_be_taken(precision: str, gaps: dict[str, str], overrides: str, step: str) -> None:
    """Only methods that exist at the precision and are not measured yet; and the settings that reach the precision."""
    answer = judge(precision, entry(24, 64, **gaps), entry(24), overrides)["answer"]
    assert answer.endswith(f"Next: {step}")


def of_prompts(means: list[int], answers: int = 8) -> dict[str, Any]:
    correct = np.concatenate([np.arange(answers) < right for right in means])
    rate, low, high = pass_interval(correct, np.ones_like(correct), np.repeat(np.arange(len(means)), answers))
    methods = {"trace": {"gap": "small"}}
    return {"prompts": len(means), "pass_at_1": rate, "pass_at_1_low": low, "pass_at_1_high": high, "methods": methods}


def test_four_prompts_that_are_always_right_are_no_certainty() -> None:
    """32 of 32 right in bf16 and 30 of 32 below: no loss. None right is one."""
    assert judge("nvfp4", of_prompts([8, 8, 7, 7]), of_prompts([8, 8, 8, 8]))["verdict"] == "yes"
    assert judge("nvfp4", of_prompts([0, 0, 0, 0]), of_prompts([8, 8, 8, 8]))["verdict"] == "no"


def test_answers_to_few_prompts_do_not_make_bf16_certain() -> None:
    """2 prompts of 8 answers, 12 right: a model that solves nothing reaches up to 0.66 at 2 prompts, whatever its answers."""
    found = judge("nvfp4", of_prompts([0, 0]), of_prompts([7, 5]))
    assert found["verdict"] == "unknown" and "too uncertain to show a loss" in found["answer"]
