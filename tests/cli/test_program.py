"""The real program as other programs use it: one JSON object on stdout, progress on stderr, and an end on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_jax.models.hf import save_hf_directory
from trace_jax.train.checkpoint import load_policy

Program = Callable[..., subprocess.CompletedProcess[str]]


def one_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """stdout as one JSON object; `json.loads` refuses anything before or after it."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("name", "key", "phase"), [("sft", "checkpoint", "cold start: "), ("run", "run", "training: ")])
def test_training_commands(folder: Path, name: str, key: str, phase: str) -> None:
    printed = json.loads((folder / f"{name}.json").read_text())
    result = json.loads(printed["stdout"])
    assert result[key] == str(folder / name) and result["metrics"]
    lines = printed["stderr"].splitlines()
    assert lines[0].startswith(phase) and lines[-1].startswith("step ")


@pytest.mark.parametrize(
    ("arguments", "keys", "phases"),
    [
        (["eval", "run"], {"pass_at_1", "low", "high"}, ["reading run ...", "generating and verifying answers"]),
        pytest.param(
            ["mismatch", "run", "--precisions", "bf16", "--max-prompts", "2"],
            {"precisions", "limits"},
            ["reading run ...", "bf16: generating answers (1 of 2) ...", "bf16: compiling and measuring trainer bf16 (2 of 2) ..."],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["rollout", "run", "--out", "new/answers.jsonl", "--max-prompts", "1"],
            {"out", "pass_rate"},
            ["reading run ...", "generating 4 answers"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["report", "run", "--out", "page.html"], {"html", "png"}, ["drawing run ..."], marks=pytest.mark.slow),
        pytest.param(
            ["import", "huggingface", "from-huggingface"],
            {"checkpoint", "parameters"},
            ["importing huggingface ..."],
            marks=pytest.mark.slow,
        ),
        (["train", "config.yaml", "--dry-run"], {"config", "memory"}, []),
        pytest.param(["bench", "dequantize", "--small"], {"rows"}, ["timing dequantize ..."], marks=pytest.mark.slow),
        (["doctor"], {"devices", "versions"}, []),
    ],
)
def test_commands_with_results(folder: Path, program: Program, arguments: list[str], keys: set[str], phases: list[str]) -> None:
    if arguments[0] == "import":
        loaded = load_policy(folder / "run")
        save_hf_directory(folder / "huggingface", loaded.policy.family, loaded.policy.config, loaded.params)
    done = program(*arguments, "--json", cwd=folder)
    assert keys <= one_object(done).keys()
    lines = done.stderr.splitlines()
    assert len(lines) == len(phases) and all(line.startswith(phase) for line, phase in zip(lines, phases, strict=True)), done.stderr


def test_ctrl_c_is_one_line(folder: Path, environment: dict[str, str]) -> None:
    """A terminal sends the interrupt to every process of the group, so the verifiers get it too."""
    command = [sys.executable, "-m", "trace_jax", "eval", "run", "--max-prompts", "200", "--samples", "64"]
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background program, and its children, ignore it
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        signal.signal(signal.SIGINT, former)
        assert running.stderr is not None and running.stdout is not None
        assert running.stderr.readline() == "reading run ...\n"
        assert running.stderr.readline().startswith("generating")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(120) == 1
        assert running.stderr.read() == "interrupted\n" and running.stdout.read() == ""
