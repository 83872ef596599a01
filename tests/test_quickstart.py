"""The quickstart from start to end, with every kind of method, at a size of seconds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from trace_jax import quickstart
from trace_jax.errors import UserError
from trace_jax.quickstart import DEFAULT_CONFIG, main

TINY = (
    *("model.config={hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, num_experts: 4, experts_per_token: 2, "
      "expert_hidden_size: 32, max_position: 64}",),
    *("sft.steps=2", "sft.batch_size=8", "sft.warmup_steps=1", "sft.max_prompts=4", "sft.eval_every=2", "task.params.size=200"),
    *("rollout.group_size=2", "rollout.prompts_per_step=2", "train.unguided_every=1", "train.micro_batch_tokens=128"),
    *("guidance.audit.every=1", "guidance.audit.sequences=1", "eval.max_prompts=4", "steps=1"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "gaps", "evaluations"),
    [
        pytest.param(["method=bf16"], ["training forward, not guided"], [0, 1], marks=pytest.mark.slow),
        pytest.param(["method=naive", "eval.every=0"], ["training forward, not guided"], [], marks=pytest.mark.slow),
        (["method=trace"], ["guided forward", "unguided forward"], [0, 1]),
    ],
)
def test_every_kind_of_method_ends_with_its_figures(
    arguments: list[str],
    gaps: list[str],
    evaluations: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == 0
    shown = capsys.readouterr().out
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert (tmp_path / "runs/quickstart/quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert [gap["forward"] for gap in summary["gaps"]] == gaps
    assert [rate["step"] for rate in summary["evaluations"]] == evaluations
    record, audit = arguments == ["method=trace"], arguments != ["method=bf16"]
    assert bool(summary["bytes_per_token"]) is ("bytes per token" in shown) is record
    assert bool(summary["code_agreement"]) is ("newest audit" in shown) is audit


def test_no_steps_are_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="steps is 0"):
        main([str(DEFAULT_CONFIG), "steps=0"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "left"), [("run_sft", ["cold-start"]), ("run_training", ["cold-start", "train"])])
def test_a_signal_ends_it_in_either_part(
    command: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = getattr(quickstart, command)

    def interrupted(*arguments: Any, report: Any = None) -> Any:
        return run(*arguments[:2], report=lambda step, metrics: signal.raise_signal(signal.SIGTERM))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, command, interrupted)
    assert main([*TINY, "steps=2"]) == 1
    assert sorted(path.name for path in (tmp_path / "runs/quickstart").iterdir()) == left
    shown = capsys.readouterr()
    assert "is saved" in shown.err and ("2. RL" in shown.out) is (command == "run_training")
