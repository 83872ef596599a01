"""Combinations that cannot hold, settings that are not implemented, and settings that would bias training."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trace_jax.config import ALGORITHMS, METHODS, Config, check_for_training, from_mapping
from trace_jax.errors import UserError

BASE: dict[str, Any] = {"model": {"config": {"num_layers": 4}}}


def config(*overrides: str) -> Config:
    return from_mapping(BASE, overrides)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["sync.every=3"], "sync.max_staleness is 0"),
        (["train.updates_per_batch=2"], "write 1 or more"),
        (["sync.every=2", "train.updates_per_batch=3", "sync.max_staleness=2"], "write 3 or more"),
        (["sync.max_staleness=1", "algorithm.correction.kind=none"], "asynchronous, but algorithm.correction.kind is none"),
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
        (["rollout.residual_compensation.fraction=0.1"], "train_quant.activations is guided, and a record has no residual"),
        (["method=quads", "rollout.activations=fp8"], "rollout.activations is fp8 and only nvfp4 and mxfp4 are compensated"),
        (["mesh.data=0"], "mesh.data is 0"),
        (["mesh.data=-1", "mesh.expert=-1"], "mesh.data and mesh.expert are both -1"),
        (["rollout.engine=another"], "no installed package provides"),
        (["rollout.top_k=0"], "write -1"),
        (["eval.greedy=true", "eval.samples=4"], "eval.greedy"),
        (["optimizer.name=adam", "optimizer.weight_decay=0.1"], "adam has none"),
        (["steps=20", "optimizer.decay_steps=19"], "write optimizer.decay_steps: 20 or more"),
        (["steps=20", "optimizer.warmup_steps=20", "optimizer.decay_steps=20"], "write optimizer.decay_steps: 21 or more"),
        (["algorithm.name=cispo", "algorithm.clip_c=3.0"], "which only algorithm.loss: ppo_clip has"),
        (["algorithm.loss_scale_factor=64"], "algorithm.aggregation token_mean has no constant"),
        (["algorithm.correction.low=0.5"], "kind tis has no lower bound"),
        (["algorithm.correction={kind: icepop, cap: 0.5}"], "keeps no token"),
        (["algorithm.correction={kind: none, level: sequence}"], "kind none has no weight"),
        (["algorithm.name=trust_band", "algorithm.correction.kind=none"], "write level: token"),
        (["algorithm.overlong_buffer.len=8"], "enable is false"),
        (["algorithm.name=dapo", "algorithm.overlong_buffer.len=65"], "write 64 or less"),
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
        ["sync.every=2", "train.updates_per_batch=3", "sync.max_staleness=3"],
        ["sync.every=2", "sync.max_staleness=1", "algorithm.correction.kind=none"],
        ["rollout.kv_cache.v=bf16"],
        ["guidance.sites=[expert_input, k]"],
        ["train_quant.activations=none"],
        ["train_quant.kv_cache=rtn"],
        ["method=qat", "rollout.kv_cache={k: fp8, v: fp8}"],
        ["method=qat_w4a16", "rollout.activations=fp8"],
        ["method=quads", "rollout.weights=mxfp4", "rollout.activations=mxfp4", "rollout.kv_cache={k: bf16, v: bf16}"],
        ["method=quads", "train_quant.activations=rtn", "rollout.residual_compensation.fraction=1.0"],
        ["rollout.weights=mxfp4", "rollout.activations=mxfp4", "rollout.kv_cache={k: mxfp4, v: mxfp4}"],
        ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.temperature=0.0"],
        ["model.source=some/run"],
        ["algorithm.correction={kind: icepop, low: 0.0, cap: 2.0}"],
        ["algorithm.name=dapo", "algorithm.overlong_buffer.len=64"],
        ["algorithm.name=dr_grpo", "algorithm.loss_scale_factor=1000"],
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
    assert of["fp8"].train_quant == of["qarl"].train_quant == of["qat"].train_quant
    assert {of["fp8"].rollout.weights, of["fp8"].rollout.activations, *of["fp8"].rollout.kv_cache.model_dump().values()} == {"fp8"}
    assert of["qat_w4a16"].train_quant.model_dump() == of["naive"].train_quant.model_dump() | {"weights": "rtn"}
    assert of["quads"].train_quant.model_dump() == of["qat_w4a16"].train_quant.model_dump() | {"kv_cache": "rtn"}
    assert [name for name, found in of.items() if found.rollout.residual_compensation.fraction] == ["quads"]
    assert {name: found.algorithm.name for name, found in of.items() if found.algorithm.name != "grpo"} == {"qarl": "trust_band"}
    assert of["qarl"].algorithm == config("algorithm.name=trust_band").algorithm
    assert config("method=qarl", "algorithm.name=gspo").algorithm.name == "gspo"


def test_only_fp4_sites_are_recorded() -> None:
    assert config("rollout.kv_cache.v=bf16").recorded_sites == ("expert_input", "k")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_train_and_is_a_name_of_the_schema(name: str) -> None:
    algorithm = config(f"algorithm.name={name}")
    check_for_training(algorithm)
    assert algorithm.algorithm.name == name
    with pytest.raises(UserError, match=f"write one of: .*{name}"):
        config("algorithm.name=another")


def test_algorithms_differ_as_documented() -> None:
    of = {name: config(f"algorithm.name={name}").algorithm for name in ALGORITHMS}
    default = config().algorithm
    assert default == of["grpo"]
    differs = {
        name: {key for key, value in found.model_dump().items() if key != "name" and value != default.model_dump()[key]}
        for name, found in of.items()
    }
    assert differs == {
        "grpo": set(),
        "dr_grpo": {"normalize_std", "aggregation"},
        "dapo": {"filter_groups", "overlong_buffer"},
        "gspo": {"ratio_level", "clip_low", "clip_high", "aggregation"},
        "cispo": {"loss", "clip_low", "clip_high"},
        "trust_band": {"ratio_level", "clip_low", "clip_high", "clip_c", "aggregation", "correction"},
    }
    assert not of["dr_grpo"].normalize_std and of["dr_grpo"].aggregation == "seq_mean_token_sum_norm"
    assert (of["dapo"].filter_groups.max_num_gen_batches, of["dapo"].overlong_buffer.penalty_factor) == (10, 1.0)
    assert (of["gspo"].clip_low, of["gspo"].clip_high, of["trust_band"].clip_c) == (3e-4, 4e-4, 1.0007)
    assert of["trust_band"].correction.model_dump() == {"kind": "tis", "level": "geometric", "cap": 2.0, "low": None}


@pytest.mark.parametrize(
    ("overrides", "least", "asynchronous"),
    [
        ([], 0, False),
        (["sync.max_staleness=1"], 0, True),
        (["train.updates_per_batch=3", "sync.max_staleness=2"], 2, False),
        (["train.updates_per_batch=3", "sync.max_staleness=3"], 2, True),
        (["sync.every=2", "sync.max_staleness=1"], 1, False),
        (["sync.every=2", "train.updates_per_batch=2", "sync.max_staleness=2"], 2, False),
        (["sync.every=2", "train.updates_per_batch=2", "sync.max_staleness=3"], 2, True),
    ],
)
def test_training_is_asynchronous_if_more_staleness_is_allowed_than_alternating_has(overrides, least, asynchronous) -> None:
    loaded = config(*overrides)
    assert (loaded.least_staleness, loaded.asynchronous) == (least, asynchronous)
