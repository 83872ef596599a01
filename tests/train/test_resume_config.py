"""What a resumed run may change: accepted and named, or refused with both values before anything is touched."""

from __future__ import annotations

import shutil

import pytest

from trace_jax.config import Config
from trace_jax.config.keys import known_keys
from trace_jax.errors import UserError
from trace_jax.train.resume import MAY_CHANGE, changed_keys, remove_later
from trace_jax.train.run import run_training


def stored(config: Config) -> dict:
    return config.model_dump(mode="json")


def test_an_unchanged_config_says_nothing(make_config):
    assert changed_keys(stored(make_config()), make_config(), "here") == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("steps=9", "steps 4 -> 9"),
        ("eval.every=7", "eval.every 2 -> 7"),
        ("checkpoint.keep=1", "checkpoint.keep 3 -> 1"),
        ("loggers=[tensorboard]", "loggers [] -> ['tensorboard']"),
        ("optimizer.decay_steps=40", "optimizer.decay_steps None -> 40"),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate 0.001 -> 0.5"),
        ("train.micro_batch_tokens=128", "train.micro_batch_tokens 64 -> 128"),
        ("train.unguided_every=0", "train.unguided_every 2 -> 0"),
        ("guidance.audit.every=0", "guidance.audit.every 2 -> 0"),
        ("task.verifier_timeout_s=9.0", "task.verifier_timeout_s 5.0 -> 9.0"),
    ],
)
def test_keys_that_may_change_are_named(make_config, override, named):
    assert changed_keys(stored(make_config()), make_config(override), "here") == [named]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.config.hidden_size=64", "model.config.hidden_size is 64, but the checkpoint in here was made with 32"),
        ("model.config.attention_bias=true", "model.config.attention_bias is True, .* was made with not set"),
        ("model.compute_dtype=bf16", "model.compute_dtype is 'bf16', .* with 'fp32'"),
        ("model.source=elsewhere", "model.source is 'elsewhere', .* with None"),
        ("tokenizer=byte", "tokenizer is 'byte', .* with 'ascii'"),
        ("task.params.size=301", "task.params.size is 301, .* with 300"),
        ("rollout.weights=mxfp4", "rollout.weights is 'mxfp4', .* with 'nvfp4'"),
        ("guidance.record=codes", "guidance.record is 'codes', .* with 'mantissa'"),
        ("optimizer.grad_clip=0.0", "optimizer.grad_clip is 0.0, .* with 1.0"),
        ("calibration.prompts=5", "calibration.prompts is 5, .* with 4"),
        ("seed=1", "seed is 1, .* with 0"),
    ],
)
def test_keys_that_may_not_are_refused(make_config, override, named):
    with pytest.raises(UserError, match=named + ".*; restore .*, or start a new run"):
        changed_keys(stored(make_config()), make_config(override), "here")


def test_a_stored_key_that_is_missing_now_counts_as_changed(make_config):
    with pytest.raises(UserError, match="model.config.head_dim is not set, .* with 16"):
        now = make_config()
        rest = {name: value for name, value in now.model.config.items() if name != "head_dim"}
        changed_keys(stored(now), now.model_copy(update={"model": now.model.model_copy(update={"config": rest})}), "here")


def test_a_config_from_before_a_key_existed_holds_its_default(make_config):
    older = stored(make_config())
    del older["train"]["remat"], older["algorithm"]["clip_low"]
    assert changed_keys(older, make_config(), "here") == ["train.remat True -> False"]


def test_the_table_names_keys_that_exist():
    keys = set(known_keys())
    assert all(name in keys or any(key.startswith(f"{name}.") for key in keys) for name in MAY_CHANGE)


def test_later_answers_and_unfinished_files_are_removed(tmp_path):
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    kept = [tmp_path / "config.yaml", *(rollouts / f"step_{step:06d}.jsonl" for step in (1, 2))]
    gone = [tmp_path / ".metrics.jsonl.0a1b2c3d.tmp", rollouts / ".step_000004.jsonl.0a1b2c3d.tmp", rollouts / "step_000003.jsonl"]
    for path in [*kept, *gone]:
        path.touch()
    remove_later(tmp_path, 2)
    assert [path.exists() for path in [*kept, *gone]] == [True] * 3 + [False] * 3


@pytest.mark.slow
def test_a_run_says_what_changed_or_stays_untouched(make_config, cold_start, tmp_path, capsys):
    config = make_config(f"model.source={cold_start.directory}", "steps=1", "eval.every=0")
    run = tmp_path / "run"
    run_training(config, run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(UserError, match="rollout.group_size"):
        run_training(config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 2})}), run, resume=True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    capsys.readouterr()
    run_training(config.model_copy(update={"steps": 2}), run, resume=True)
    assert capsys.readouterr().err == "resumed after step 1 with steps 1 -> 2\n"
    assert "steps: 2" in (run / "config.yaml").read_text().splitlines()


def test_a_cold_start_is_not_resumed_by_train(make_config, cold_start, tmp_path):
    copy = shutil.copytree(cold_start.directory, tmp_path / "cold")
    with pytest.raises(UserError, match=r"was made by sft.*set model\.source="):
        run_training(make_config(), copy, resume=True)
