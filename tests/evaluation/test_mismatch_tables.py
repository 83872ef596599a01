"""The answer of `mismatch`: which trainer at which precision, by stated limits, in tables that fit a page."""

from __future__ import annotations

from typing import Any

import pytest

from trace_jax.errors import UserError
from trace_jax.evaluation.mismatch import methods_by_precision
from trace_jax.evaluation.mismatch_tables import answers, print_mismatch
from trace_jax.evaluation.mismatch_verdict import RISKY, SMALL, gap_size
from trace_jax.evaluation.precisions import METHODS_OF


def report(errors: dict[str, float], layers: int = 2, length: int = 3) -> dict[str, Any]:
    """A report of one precision beside BF16, with `token_mult_prob_error` per method."""
    by_layer = {
        str(layer): {"code_agreement": 1.0 - 0.01 * layer, "d_act": 0.001 * layer, "adjacent_share": 0.99 - 0.002 * layer}
        for layer in range(layers)
    }
    methods = {
        name: {
            "metrics": {
                "token_mult_prob_error": error,
                "rollout_corr/k3_kl": 1e-4,
                "train_rollout_logprob_abs_diff": error - 1,
                "train_rollout_logprob_abs_diff_max": 0.5,
                "router/agreement": 0.98,
            },
            "positions": [0.01] * length,
            "sites": {"expert_input": by_layer},
            "gap": gap_size(error),
        }
        for name, error in errors.items()
    }
    entry = {"pass_at_1": 0.5, "pass_at_1_low": float("nan"), "pass_at_1_high": float("nan"), "residual_fraction": 0.5, "methods": methods}
    limits = {"token_mult_prob_error": {"small": SMALL, "risky": RISKY}}
    precisions = {"nvfp4": entry | {"answer": "nvfp4: cannot be judged"}}
    where = {"policy": "runs/[a]", "task": "task", "split": "test", "cache": None, "engine": "vllm"}
    return {**where, "limits": limits, "precisions": precisions, "not_executed": {"fp8": "fp8 cannot be measured"}}


def test_the_rules_come_before_the_answers() -> None:
    rules, answer = answers(report({"naive": 1.03}))
    assert "small up to 1.02, risky up to 1.05, large above" in rules and "pass@1" in rules
    assert answer == "nvfp4: cannot be judged"


def test_a_deep_model_and_long_answers_fit_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    print_mismatch(report({"naive": 1.03, "trace_scales": 1.01}, layers=48, length=5000))
    out = capsys.readouterr().out
    assert "runs/[a]" in out and "0.500 [nan, nan]" in out  # brackets are text, not markup
    tables = out[: out.index("Gap by")]
    assert max(map(len, tables.splitlines())) <= 120 and "…" not in tables
    # The worst of layers 36 to 47 stands for them.
    assert "36-47" in tables and "53.0%" in tables and "(0.047)" in tables and "89.6%" in tables
    assert (
        "answers by engine vllm" in tables
        and "nvfp4: residual of 50 % of the experts' input channels" in tables
        and "fp8 cannot be measured" in out
    )


def test_what_is_measured() -> None:
    assert methods_by_precision(None, None) == {name: list(methods) for name, methods in METHODS_OF.items()}
    # BF16 is the reference beside any choice; FP8 has no codes to record and is left out of the default.
    assert methods_by_precision(["trace"], None) == {"bf16": ["bf16"], "nvfp4": ["trace"], "mxfp4": ["trace"]}
    assert methods_by_precision(["qat", "naive"], ["mxfp4", "mxfp4"]) == {"mxfp4": ["naive", "qat"]}
    with pytest.raises(UserError, match="none of them makes sense at precision fp8; write some of: naive, qat"):
        methods_by_precision(["trace"], ["nvfp4", "fp8"])
    with pytest.raises(
        UserError, match="nvfp4_4over6 is one of eval, .* write some of: bf16, fp8, nvfp4, mxfp4, or measure it with --variants"
    ):
        methods_by_precision(None, ["nvfp4_4over6"])
