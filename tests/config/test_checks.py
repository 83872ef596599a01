"""Combinations that cannot hold, settings that are not implemented, and settings that would bias training."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trace_jax.config import METHODS, Config, check_for_training, from_mapping
from trace_jax.errors import UserError

BASE: dict[str, Any] = {"model": {"config": {"num_layers": 4}}}


def config(*overrides: str) -> Config:
    return from_mapping(BASE, overrides)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["sync.every=3"], "sync.max_staleness is 0"),
        (["train.updates_per_batch=2"], "write 1 or more"),
        (["sync.every=2", "train.updates_per_batch=3", "sync.max_staleness=4"], "write 5 or more"),
        (["guidance.record=none"], "guidance.record is none"),
        (["rollout.activations=bf16"], "train_quant.activations is guided"),
        (["rollout.activations=fp8"], "write activations: rtn"),
        (["rollout.kv_cache={k: bf16, v: bf16}"], "train_quant.kv_cache is guided"),
        (["rollout.kv_cache.k=fp8"], "train_quant.kv_cache is guided"),
        (["guidance.sites=[k, v]"], "guidance.sites has no expert_input"),
        (["guidance.sites=[expert_input]"], "guidance.sites has no k or v"),
        (["method=bf16", "guidance.record=mantissa"], "no site of guidance.sites is FP4"),
        (["method=qat", "guidance.record=mantissa"], "nothing follows the record: train_quant.activations is rtn"),
        (["train_quant.activations=none", "train_quant.kv_cache=rtn"], "write record: none"),
        (["rollout.residual_compensation.fraction=0.1"], "not implemented"),
        (["mesh.data=2"], "mesh.data is 2"),
        (["mesh.expert=-1"], "mesh.expert is -1"),
        (["rollout.engine=another"], "no installed package provides"),
        (["rollout.top_k=0"], "write -1"),
        (["eval.greedy=true", "eval.samples=4"], "eval.greedy"),
        (["optimizer.name=adam", "optimizer.weight_decay=0.1"], "adam has none"),
        (["steps=20", "optimizer.decay_steps=19"], "write optimizer.decay_steps: 20 or more"),
        (["steps=20", "optimizer.warmup_steps=20", "optimizer.decay_steps=20"], "write optimizer.decay_steps: 21 or more"),
        (["sft.stop_pass_rate=0.5", "sft.eval_every=0"], "never looked at"),
        (["train.updates_per_batch=20", "sync.max_staleness=19"], "prompts to split"),
        (["rollout.max_prompt_tokens=5000"], "write 5064 or more"),
        (["model.config={}"], "model.source and model.config are both empty"),
    ],
)
def test_refused(overrides: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    assert part in str(caught.value) and re.search("; (write|add|set) ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync.every=2", "train.updates_per_batch=3", "sync.max_staleness=5"],
        ["rollout.kv_cache.v=bf16"],
        ["guidance.sites=[expert_input, k]"],
        ["train_quant.activations=none"],
        ["train_quant.kv_cache=rtn"],
        ["method=qat", "rollout.kv_cache={k: fp8, v: fp8}"],
        ["rollout.weights=mxfp4", "rollout.activations=mxfp4", "rollout.kv_cache={k: mxfp4, v: mxfp4}"],
        ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.temperature=0.0"],
        ["model.source=some/run"],
    ],
)
def test_allowed(overrides: list[str]) -> None:
    config(*overrides)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.top_k=50", "rollout.top_k"),
        ("rollout.temperature=0.0", "rollout.temperature"),
        ("rollout.group_size=1", "rollout.group_size"),
    ],
)
def test_logp_05_settings_that_bias_the_ratio_are_refused_in_training_only(override: str, key: str) -> None:
    allowed_elsewhere = config(override)
    with pytest.raises(UserError, match=key):
        check_for_training(allowed_elsewhere)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_train(method: str) -> None:
    check_for_training(config(f"method={method}"))


def test_methods_differ_as_documented() -> None:
    of = {method: config(f"method={method}") for method in METHODS}
    assert of["bf16"].rollout.weights == "bf16" and of["bf16"].recorded_sites == ()
    assert of["naive"].rollout == of["qat"].rollout == of["trace"].rollout
    assert set(of["naive"].train_quant.model_dump().values()) == {"none"}
    assert set(of["qat"].train_quant.model_dump().values()) == {"rtn"}
    assert [of[name].guidance.record for name in ("trace", "trace_full", "trace_scales")] == ["mantissa", "codes", "scales"]
    assert of["trace_full"].guidance.layers == "all"


def test_only_fp4_sites_are_recorded() -> None:
    assert config("rollout.kv_cache.v=bf16").recorded_sites == ("expert_input", "k")
