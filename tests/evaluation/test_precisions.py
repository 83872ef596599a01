"""What a precision sets, and that its name comes from the engine, never from what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import tiny_policy as tiny
from trace_jax.config import load
from trace_jax.errors import UserError
from trace_jax.evaluation import mismatch, open_policy
from trace_jax.evaluation.precision_rollout import roll_out
from trace_jax.evaluation.precisions import (
    METHODS_OF,
    methods_of,
    precision_config,
    precision_name,
    precision_overrides,
    require_measurable,
    rollout_name,
)
from trace_jax.evaluation.rollout import _open
from trace_jax.evaluation.run import pass_rate_at
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.rollout.engine import Capabilities
from trace_jax.train import rl

KV_ONLY = ["guidance.sites=[k, v]", "train_quant.activations=rtn"]
"""A run that guides a part of its sites."""


@pytest.mark.parametrize("precision", METHODS_OF)
def test_a_run_that_guides_some_sites_can_be_measured_with_every_method(config_file: Path, precision: str) -> None:
    config = load(config_file, KV_ONLY)
    for method in METHODS_OF[precision]:
        found = precision_config(config, precision, method)
        assert found.method == method and precision_overrides(found, precision) == ""
        assert set(found.recorded_sites) == ({"expert_input", "k", "v"} if method.startswith("trace") else set())


def test_the_settings_that_reach_a_precision(config_file: Path) -> None:
    config = load(config_file)
    keys = ("rollout.weights", "rollout.activations", "rollout.kv_cache.k", "rollout.kv_cache.v")
    assert precision_overrides(config, "nvfp4") == ""
    assert precision_overrides(config, "mxfp4") == " ".join(f"{key}=mxfp4" for key in keys)
    reached = load(config_file, precision_overrides(config, "mxfp4").split())
    assert precision_overrides(reached, "mxfp4") == ""
    assert precision_overrides(load(config_file, ["rollout.kv_cache.v=mxfp4"]), "nvfp4").startswith("rollout.weights=nvfp4 ")


@pytest.mark.parametrize("precision", METHODS_OF)
def test_an_embedded_engine_is_named_by_its_precision(precision: str) -> None:
    assert precision_name(tiny.engine(tiny.PLANS[precision], seed=None).capabilities()) == precision


def test_a_compensated_rollout_stays_so_where_there_is_something_to_compensate(config_file: Path) -> None:
    plain, quads = (
        load(config_file, [f"method={method}", "rollout.residual_compensation.fraction=0.25"][:count])
        for method, count in (("qat", 1), ("quads", 2))
    )
    assert methods_of(plain, "nvfp4") == ("naive", "qat_w4a16", "qat", "trace_scales", "trace", "trace_full")
    assert methods_of(quads, "nvfp4") == ("naive", "qat_w4a16", "qat", "quads") and methods_of(quads, "fp8") == METHODS_OF["fp8"]
    for config, precision, fraction in ((quads, "nvfp4", 0.25), (quads, "bf16", 0.0), (plain, "mxfp4", 0.0)):
        for method in methods_of(config, precision):
            assert precision_config(config, precision, method).rollout.residual_compensation.fraction == fraction
    with pytest.raises(UserError, match="a record has no residual"):
        precision_config(quads, "nvfp4", "trace")
    assert precision_overrides(quads, "nvfp4") == "rollout.residual_compensation.fraction=0.25"  # the advice keeps what was measured
    assert precision_overrides(quads, "bf16").endswith("v=bf16")
    # Four-over-six is a matter of weights: the inputs are NVFP4 all the same.
    assert precision_config(quads, "nvfp4_4over6", "naive").rollout.residual_compensation.fraction == 0.25
    assert precision_overrides(quads, "nvfp4_4over6").endswith(" rollout.residual_compensation.fraction=0.25")
    for config, method, remedy in ((plain, "quads", "add rollout.residual_compensation.fraction=0.5"), (quads, "trace", "to 0.0")):
        with pytest.raises(UserError, match=f"--methods: {method} .*{remedy}"):
            require_measurable(config, {"nvfp4": ["naive", method]})
    for method in ("fp8", "qarl"):
        with pytest.raises(UserError, match=f"--methods '{method}' has a rollout or objective of its own"):
            mismatch.methods_by_precision([method], None)


def test_the_channels_of_the_run_survive_other_precisions(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, chosen = {"expert_input": np.zeros((2, 16), np.int32)}, {"expert_input": np.ones((2, 32), np.int32)}
    monkeypatch.setattr(open_policy, "compensated", lambda setup, *_: replace(setup, channels=setup.channels or chosen))
    opened = replace(_open(config_file, []), channels={("nvfp4", 0.5): stored})
    quads = load(config_file, ["method=quads"])
    for precision, found in (("mxfp4", chosen), ("nvfp4", stored), ("mxfp4", chosen)):
        assert opened.setup(precision_config(quads, precision, "quads")).channels is found
    opened.task.close()


def test_an_engine_is_named_with_what_it_compensates() -> None:
    told = tiny.engine(tiny.PLANS["nvfp4"], seed=None).capabilities()
    assert rollout_name(told) == "nvfp4"
    assert rollout_name(replace(told, residual_fraction=0.5)) == "nvfp4, residual of 50 % of the input channels compensated"


def fall_back(monkeypatch: pytest.MonkeyPatch) -> str:
    """Every engine executes BF16 activations from here on; returns what that is called."""
    honest = EmbeddedEngine.capabilities

    def capabilities(self: EmbeddedEngine) -> Capabilities:
        return replace(honest(self), activations="bf16")

    monkeypatch.setattr(EmbeddedEngine, "capabilities", capabilities)
    return "weights nvfp4, activations bf16, k nvfp4, v nvfp4"


def test_an_engine_that_fell_back_is_not_called_by_what_was_asked(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fall_back(monkeypatch)
    opened = _open(config_file, [])
    settings: Any = {"split": "validation", "samples": 1, "max_prompts": 1, "temperature": 1.0, "seed": 0}
    assert pass_rate_at(opened, "nvfp4", **settings).precision == name
    with pytest.raises(UserError, match=f"nvfp4 cannot be measured: engine jax executes {name}"):
        roll_out(opened, "nvfp4", split="validation", prompts=1, samples=1, seed=0)
    opened.task.close()


def test_a_precision_that_nobody_asked_for_may_be_missing(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fall_back(monkeypatch)
    monkeypatch.setattr(mismatch, "METHODS_OF", {"nvfp4": ("naive",)})
    monkeypatch.setattr(mismatch, "open_policy", lambda *_: _open(config_file, []))
    report = mismatch.measure_mismatch(config_file, engine="jax", max_prompts=1)
    assert report["engine"] == "jax" and report["precisions"] == {}
    assert report["not_executed"]["nvfp4"].startswith(f"nvfp4 cannot be measured: engine jax executes {name}")
    with pytest.raises(UserError, match="nvfp4 cannot be measured"):
        mismatch.measure_mismatch(config_file, precisions=["nvfp4"], max_prompts=1)


def test_training_reports_what_its_engine_executes(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(pass_at_1=0.5, low=0.4, high=0.6, reward_mean=0.5, precision="weights nvfp4, activations bf16, k fp8, v fp8")
    monkeypatch.setattr(rl, "measure_pass_rate", lambda *_, **__: result)
    monkeypatch.setattr(rl.Learner, "sync", lambda self: None)
    monkeypatch.setattr(rl.Learner, "serve", lambda self, weights: None)
    opened = _open(config_file, [])
    learner = object.__new__(rl.Learner)
    learner.setup = opened.setup(opened.config)
    learner.engine, learner.served = tiny.engine(tiny.PLANS["nvfp4"], seed=None), rl.PolicyVersion(opened.params, 0)
    assert rl.evaluate(learner)["eval/validation/precision"] == result.precision
    opened.task.close()


def test_every_config_is_checked_before_the_first_answer(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _open(config_file, [])
    monkeypatch.setattr(mismatch, "open_policy", lambda *_: opened)
    monkeypatch.setattr(mismatch, "roll_out", lambda *_, **__: pytest.fail("answers were generated"))

    def refuse_the_last(config: Any, precision: str, method: str) -> Any:
        if (precision, method) == ("mxfp4", "trace_full"):
            raise UserError("this one cannot be measured")
        return precision_config(config, precision, method)

    monkeypatch.setattr(mismatch, "precision_config", refuse_the_last)
    with pytest.raises(UserError, match="this one cannot be measured"):
        mismatch.measure_mismatch(config_file)
