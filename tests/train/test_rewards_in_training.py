"""REW-01 and -02 through `train`: rewards that fail or hang are counted, never taken for wrong answers; rows of the field's forms earn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.run import run_training
from trace_jax.train.run_sft import run_sft

MODULE = """
import os, time

HERE = os.path.dirname(__file__)

def sometimes_raises(completion, answer, row):
    if row.prompt_id % 3 == 1:
        raise ValueError("no verdict today")
    return float(len(completion))

def sometimes_hangs(completion, answer, row):
    if row.prompt_id % 3 == 1:
        time.sleep(600)
    return float(len(completion))

def breaks(completion, answer, row):
    if os.path.exists(os.path.join(HERE, "broken")):
        raise ValueError("the judge is broken")
    return float(len(completion))
"""


@pytest.fixture
def judge(tmp_path, monkeypatch) -> Path:
    """Folder of the module `training_judge`."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "training_judge.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def config(make_config, cold_start):
    return lambda *overrides: make_config(
        f"model.source={cold_start.directory}", "eval.every=100", "guidance.audit.every=0", "checkpoint.every=1", "steps=2", *overrides
    )


def rollouts(directory: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        pytest.param("sometimes_raises", "ValueError: no verdict today", marks=pytest.mark.slow),
        pytest.param("sometimes_hangs", "cut off after 0.3 seconds", marks=pytest.mark.slow),
    ],
)
def test_rew_01_failing_answers_are_counted_and_left_out(config, judge, tmp_path, capfd, reward, reason):
    """A reward that gives no verdict on a third of the prompts."""
    run_training(config(f"task.reward=training_judge:{reward}", "task.verifier_timeout_s=0.3"), tmp_path / "run")
    failed = 0
    for row in read_metrics(tmp_path / "run")[1:]:
        rewards = [answer["reward"] for answer in rollouts(tmp_path / "run", row["step"])]
        given = [value for value in rewards if value is not None]
        assert row["reward/verifier_errors"] == rewards.count(None) and len(rewards) == 8
        assert row["reward/mean"] == pytest.approx(sum(given) / len(given)) and math.isfinite(row["loss"])
        failed += rewards.count(None)
    assert 0 < failed < 16
    shown = [line for line in capfd.readouterr().err.splitlines() if "training_judge" in line]
    assert len(shown) == 1 and f"task.reward training_judge:{reward} failed on the prompt" in shown[0] and reason in shown[0]


@pytest.mark.slow
def test_rew_01_a_reward_that_fails_from_the_start_ends_the_run(config, judge, tmp_path):
    (judge / "broken").touch()
    with pytest.raises(UserError) as caught:
        run_training(config("task.reward=training_judge:breaks"), tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("task.reward training_judge:breaks has no verdict on any answer of the first batch; on the prompt '")
    assert message.endswith("ValueError: the judge is broken; mend it or choose another task.reward") and "\n" not in message
    assert not (tmp_path / "run").exists()
    (judge / "broken").unlink()
    assert math.isfinite(run_training(config("task.reward=training_judge:breaks"), tmp_path / "run").metrics["reward/mean"])


def test_rew_01_a_reward_that_breaks_on_the_way_costs_no_checkpoint(config, judge, tmp_path):
    directory, settings = tmp_path / "run", config("task.reward=training_judge:breaks", "steps=5")

    def break_after_step_1(step: int, metrics: dict[str, Any]) -> None:
        if step == 1:
            (judge / "broken").touch()

    with pytest.raises(UserError, match="no verdict on any answer of 3 batches in a row; .*the judge is broken"):
        run_training(settings, directory, report=break_after_step_1)
    assert [row.get("reward/verifier_errors") for row in read_metrics(directory)] == [None, 0, 8, 8]
    assert (directory / "checkpoints" / "3").is_dir()
    (judge / "broken").unlink()
    run_training(settings, directory, resume=True)
    assert [row.get("reward/verifier_errors") for row in read_metrics(directory)] == [None, 0, 8, 8, 0, 0]


FORMS = {
    "gsm8k": lambda number: {"question": f"q{number:03d}", "answer": "#### 3"},
    "verl": lambda number: {
        "data_source": "tiny",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"q{number:03d}"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_rew_02_rows_of_the_field_are_learned_and_rewarded_as_mathematics(make_config, tmp_path, form):
    """One answer to all questions: a short cold start learns it, and the math reward finds it in sampled text."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(FORMS[form](number)) + "\n" for number in range(90)))
    overrides = [f"task={{name: 'jsonl:{rows}', reward: math}}", "rollout.max_new_tokens=12", "guidance.audit.every=0"]
    cold = run_sft(make_config(*overrides, "sft.steps=200", "sft.stop_pass_rate=0.5"), tmp_path / "cold").metrics
    assert cold["sft/pass_at_1"] >= 0.5
    config = make_config(*overrides, f"model.source={tmp_path / 'cold'}", "steps=1", "eval.every=0")
    metrics = run_training(config, tmp_path / "run").metrics
    assert metrics["reward/verifier_errors"] == 0 and metrics["reward/pass_rate"] == metrics["reward/mean"] > 0
    texts = [answer for answer in rollouts(tmp_path / "run", 1) if answer["reward"] == 1]
    assert texts and all("3" in json.dumps(answer) for answer in texts)
