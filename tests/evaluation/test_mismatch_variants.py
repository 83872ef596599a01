"""The config of a variant, and its row."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trace_jax.config import load
from trace_jax.errors import UserError
from trace_jax.evaluation.mismatch_variants import print_variants, variant_config


def test_a_variant_without_a_method_keeps_the_keys_of_the_run(config_file: Path) -> None:
    """The preset of the run's method would take back what the run, or the command line, says otherwise."""
    base = load(config_file, ["method=trace", "guidance.layers=all", "guidance.sites=[k, v]", "train_quant.activations=rtn"])
    found = variant_config(base, ['rollout.weights="nvfp4_4over6"'])
    assert found.rollout.weights == "nvfp4_4over6"
    assert (found.guidance, found.train_quant, found.method) == (base.guidance, base.train_quant, base.method)
    named = variant_config(base, ['method="trace"'])
    assert named.guidance.layers == "last_half" and set(named.guidance.sites) == {"expert_input", "k", "v"}
    for method in ('"tracer"', '["trace"]', "null"):
        with pytest.raises(UserError, match="write one of: bf16, naive"):
            variant_config(base, [f"method={method}"])


def test_a_layer_without_differences_does_not_hide_the_worst_one(capsys: pytest.CaptureFixture[str]) -> None:
    def entry(*shares: float) -> dict:
        layers = {str(layer): {"code_agreement": 0.5, "adjacent_share": share} for layer, share in enumerate(shares)}
        names = ("rollout_corr/k3_kl", "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max")
        return {"pass_at_1": 0.25, "metrics": dict.fromkeys(names, 0.0), "sites": {"k": layers}}

    print_variants(
        {"policy": "p", "task": "t", "split": "test", "variants": {"some": entry(math.nan, 0.75, 0.875), "none": entry(math.nan)}}
    )
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["some"][-1] == "0.7500" and lines["none"][-1] == "-"
