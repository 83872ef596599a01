"""Loading: precedence, overrides, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import Config, dump, from_mapping, load, parse_override
from trace_jax.config.keys import known_keys, nearest_key
from trace_jax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
BASE: dict[str, Any] = {"model": {"config": {"num_layers": 4}}}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)


def refusal(overrides: list[str], base: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        from_mapping(BASE if base is None else base, overrides, source="run.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_those_of_the_design() -> None:
    config = from_mapping(BASE)
    assert config.method == "trace"
    assert (config.rollout.weights, config.rollout.activations, config.rollout.kv_cache.k, config.rollout.kv_cache.v) == ("nvfp4",) * 4
    assert config.train_quant.model_dump() == {"weights": "rtn", "activations": "guided", "down_input": "rtn", "kv_cache": "guided"}
    assert (config.guidance.record, config.guidance.layers, config.guidance.sites) == ("mantissa", "last_half", ("expert_input", "k", "v"))
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.optimizer.name, config.optimizer.learning_rate, config.steps, config.seed) == ("adamw", 1e-6, 200, 0)


def test_mis_02_replay_and_correction_are_on_by_default() -> None:
    config = from_mapping(BASE)
    assert config.algorithm.routing_replay and config.algorithm.correction.kind == "tis" and config.algorithm.correction.cap == 5.0


def test_logp_05_no_truncation_by_default() -> None:
    config = from_mapping(BASE)
    assert config.rollout.top_p == 1.0 and config.rollout.top_k == -1


def test_precedence_is_preset_then_file_then_override(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: qat\nmodel: {config: {num_layers: 4}}\ntrain_quant: {down_input: none}\nsteps: 5\n")
    config = load(path, ["steps=7", "train_quant.kv_cache=none"])
    assert config.train_quant.model_dump() == {"weights": "rtn", "activations": "rtn", "down_input": "none", "kv_cache": "none"}
    assert config.guidance.record == "none" and config.steps == 7


def test_later_overrides_win_and_replace_whole_mappings() -> None:
    config = from_mapping(BASE, ["steps=3", "steps=4", "rollout.kv_cache.k=mxfp4", "rollout.kv_cache={v: mxfp4}"])
    assert config.steps == 4 and config.rollout.kv_cache.model_dump() == {"k": "nvfp4", "v": "mxfp4"}


def test_overrides_reach_into_free_mappings() -> None:
    assert from_mapping(BASE, ["model.config.num_layers=2", "task.params.words=[a, b]"]).model.config == {"num_layers": 2}


def test_values_are_not_changed_by_overrides() -> None:
    from_mapping(BASE, ["model.config.num_layers=9"])
    assert BASE == {"model": {"config": {"num_layers": 4}}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.grup_size=3", ["rollout.grup_size", "on the command line", "did you mean rollout.group_size?"]),
        ("group_size=3", ["group_size", "did you mean rollout.group_size?"]),
        ("clip_hihg=1", ["did you mean algorithm.clip_high?"]),
        ("steps.x=3", ["steps.x", "not a known key"]),
        ("zzzqqq=3", ["zzzqqq", "not a known key", "train CONFIG --dry-run then prints every key"]),
        ("rollout.group_size=many", ["rollout.group_size is many", "whole number"]),
        ("rollout.group_size=2.0", ["whole number"]),
        ("rollout.group_size=true", ["whole number"]),
        ("rollout.group_size=null", ["rollout.group_size is null"]),
        ("optimizer.learning_rate=fast", ["a number"]),
        ("optimizer.learning_rate=.inf", ["finite"]),
        ("eval.greedy=yes", ["true or false"]),
        ("tokenizer=3", ["write text"]),
        ("rollout=3", ["rollout is 3", "a mapping"]),
        ("task.params=[1]", ["a mapping"]),
        ("loggers=tensorboard", ["a list"]),
        ("loggers=[wandb]", ["loggers.0 is wandb", "one of: tensorboard"]),
        ("rollout.activations=mxfp8", ["one of: bf16, fp8, nvfp4, mxfp4"]),
        ("train_quant.weights=guided", ["one of: none, rtn"]),
        ("train_quant.down_input=guided", ["one of: none, rtn"]),
        ("algorithm.name=ppo", ["algorithm.name is ppo", "one of: grpo, dr_grpo"]),
        ("method=quadz", ["quadz", "one of: bf16, naive, qat, fp8, qat_w4a16, quads, qarl, trace"]),
        ("method=3", ["method is 3"]),
        ("guidance.layers=last:0", ["all, last_half, last:N, first:N or a list of layer ids"]),
        ("guidance.sites=[k, k]", ["once"]),
        ("guidance.sites=[q]", ["one of: expert_input, k, v"]),
        ("rollout.top_p=2", ["at most 1.0"]),
        ("steps=0", ["at least 1"]),
        ("optimizer.b1=1.0", ["less than 1.0"]),
        ("algorithm.clip_low=0.0", ["greater than 0.0"]),
        ("steps", ["key=value"]),
        ("=3", ["key=value"]),
        ("rollout..k=3", ["key=value"]),
        ("steps={", ["override steps line 1"]),
    ],
)
def test_mistakes_are_named(override: str, parts: list[str]) -> None:
    message = refusal([override])
    for part in parts:
        assert part in message, message


def test_message_says_where_the_key_was_set() -> None:
    message = refusal(["seed=1"], BASE | {"rollout": {"grup_size": 3}})
    assert "in run.yaml" in message and "command line" not in message
    assert "and 1 more" in refusal(["steps=0", "seed=-1"])


def test_a_method_on_the_command_line_is_not_undone_by_the_file() -> None:
    resolved = from_mapping(BASE).model_dump(mode="json")
    message = refusal(["method=qat"], resolved)
    assert "method=qat" in message and "train_quant.activations" in message and "guided" in message
    assert from_mapping(resolved, ["method=qat", "train_quant={}", "guidance.record=none"]).guidance.record == "none"
    assert from_mapping(resolved, ["method=trace"]).method == "trace"


def test_an_algorithm_stands_below_the_file_and_is_not_undone_by_it() -> None:
    """As with `method`; an algorithm that the file itself names is filled up by it."""
    written = BASE | {"algorithm": {"name": "gspo", "clip_high": 1e-3}}
    algorithm = from_mapping(written, ["algorithm.clip_low=2e-3"]).algorithm
    assert (algorithm.ratio_level, algorithm.clip_low, algorithm.clip_high) == ("geometric", 2e-3, 1e-3)
    assert algorithm.aggregation == "seq_mean_token_mean"
    message = refusal(["algorithm.name=trust_band"], written)
    assert "algorithm.name=trust_band on the command line stands for algorithm.clip_high: 0.0004" in message
    assert "remove that line from the file, or add algorithm.clip_high=0.0004" in message
    unnamed = BASE | {"algorithm": {"clip_high": 0.3}}  # written for the default, whose bound would clip nothing here
    assert "algorithm.name=gspo on the command line stands for algorithm.clip_high: 0.0004" in refusal(["algorithm.name=gspo"], unnamed)
    assert from_mapping(unnamed, ["algorithm.name=grpo"]).algorithm.clip_high == 0.3
    assert "stands for algorithm.clip_high: 0.0004" in refusal(["method=qarl"], unnamed)  # its preset names trust_band
    resolved = from_mapping(written).model_dump(mode="json")
    assert from_mapping(resolved, ["algorithm.name=gspo"]) == from_mapping(written)


TASK: dict[str, Any] = {"name": "jsonl:a", "params": {"test": "b"}, "question_pattern": "(x)", "reward": "exact"}


def test_another_task_on_the_command_line_starts_from_the_defaults() -> None:
    defaults = from_mapping(BASE).task
    changed = from_mapping(BASE | {"task": TASK}, ["task.params.size=5", "task.name=reasoning_gym:gcd"]).task
    assert changed == defaults.model_copy(update={"name": "reasoning_gym:gcd", "params": {"size": 5}})
    assert from_mapping(BASE | {"task": {"params": {"size": 5}}}, ["task.name=reasoning_gym:gcd"]).task.params == {}


@pytest.mark.parametrize("overrides", [["task.name=jsonl:a"], ["task.reward=exact"]])
def test_the_same_task_on_the_command_line_keeps_the_section(overrides: list[str]) -> None:
    assert from_mapping(BASE | {"task": TASK}, overrides).task.model_dump(exclude_unset=True) == TASK
    default = BASE | {"task": {"params": {"size": 5}}}
    assert from_mapping(default, ["task.name=reasoning_gym:chain_sum"]).task.params == {"size": 5}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n", "mapping"),
        ("", "null"),
        ("steps: [1\n", "line 2"),
        ("steps: 1\nsteps: 2\n", "line 2, column 1: key 'steps' is given twice"),
        ("1: 2\n", "not text"),
        ("a: &x\n  <<: 3\n", "line"),
        ("\x07", "unacceptable"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path)
    assert part in str(caught.value) and "run.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"tokenizer: \xe9\n")
    with pytest.raises(UserError, match="UTF-8"):
        load(tmp_path / "latin.yaml")


def round_trip(config: Config, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert round_trip(config, tmp_path) == config


@given(
    params=st.dictionaries(st.text(max_size=8), values, max_size=4),
    rate=st.floats(min_value=1e-30, max_value=1e30),
    ids=st.sets(st.integers(0, 99), min_size=1),
)
def test_dump_round_trips(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any], rate: float, ids: set[int]) -> None:
    config = from_mapping(BASE | {"task": {"params": params}, "optimizer": {"learning_rate": rate}, "guidance": {"layers": sorted(ids)}})
    again = round_trip(config, tmp_path_factory.getbasetemp())
    assert again == config and again.task.params == params


@given(st.sampled_from(["steps", "train.micro_batch_tokens", "checkpoint.keep", "sft.batch_size"]), st.integers(1, 10**9))
def test_integer_overrides(key: str, value: int) -> None:
    config: Any = from_mapping(BASE, [f"{key}={value}"])
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value


@given(st.floats(min_value=1e-12, max_value=1e6))
def test_float_overrides_in_any_notation(value: float) -> None:
    for text in (repr(value), f"{value:e}", f"{value:.17g}"):
        assert parse_override(f"optimizer.learning_rate={text}")[1] == float(text)


@given(st.text(max_size=30))
def test_any_override_text_is_taken_or_refused_in_one_line(text: str) -> None:
    try:
        from_mapping(BASE, [text])
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("key", [key for key in known_keys() if len(key.rpartition(".")[2]) > 4])
def test_a_slip_of_the_finger_is_recognised(key: str) -> None:
    assert nearest_key(key[:-2] + key[-1]) == key
