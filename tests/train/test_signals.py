"""Stopping the program from outside: SIGTERM ends it cleanly, kill -9 costs the steps since the last complete checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.selection import slow_but
from tests.train.invariants import MODES, violations
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.checkpoint import load_policy

ROOT = Path(__file__).resolve().parents[2]
EVERY = 2
"""Steps from one checkpoint to the next."""

PATIENCE = 240.0
"""Seconds until a started program must have done what is waited for; compiling takes long on a busy machine."""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, values, cold_start):
    values["model"]["source"] = str(cold_start.directory)
    values |= {
        "eval": {"every": 100_000, "max_prompts": 2},
        "guidance": {"audit": {"every": 0}},
        "checkpoint": {"every": EVERY},
        "steps": 100_000,
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def start(environment, config_file):
    """`start(out, ...)` starts `trace-jax train` (or another command) on the configuration."""

    def started(out: Path, *arguments: str, command: str = "train") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "trace_jax", command, str(config_file), *arguments, "--out", str(out)]
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return started


def steps(out: Path) -> list[int]:
    return [row["step"] for row in read_metrics(out)] if (out / "metrics.jsonl").exists() else []


def complete(out: Path) -> list[int]:
    folder = out / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def saving(out: Path) -> bool:
    return any((out / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def wait_for(program: subprocess.Popen[str], condition, pause: float = 0.02) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if program.poll() is not None or time.monotonic() > deadline:
            program.kill()
            pytest.fail(f"the program ended or hangs:\n{program.communicate()[0][-3000:]}")
        time.sleep(pause)


def resume(start, out: Path, last: int) -> str:
    program = start(out, f"steps={last}", "--resume")
    output = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, output[-3000:]
    return output


def stopped_by_sigterm(program: subprocess.Popen[str]) -> str:
    program.send_signal(signal.SIGTERM)
    output = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_sigterm_saves_and_exits_0_and_the_run_goes_on(start, tmp_path):
    out = tmp_path / "run"
    program = start(out)
    wait_for(program, lambda: len(steps(out)) > 3)
    output = stopped_by_sigterm(program)
    stopped = steps(out)[-1]
    assert complete(out)[-1] == stopped  # the step in progress was finished and saved, whatever checkpoint.every is
    assert f"stopped; step {stopped} is saved, go on with --resume" in output
    assert f"resumed after step {stopped}" in resume(start, out, stopped + 2)
    assert steps(out) == list(range(stopped + 3)) and complete(out)[-1] == stopped + 2


@pytest.mark.slow
def test_sigterm_during_the_first_compile_and_evaluation(start, tmp_path):
    out = tmp_path / "run"
    program = start(out)
    wait_for(program, (out / "config.yaml").exists, pause=0.001)
    assert steps(out) == []  # the evaluation of step 0, whose programs are compiled now, is still to be written
    assert "stopped; step 0 is saved, go on with --resume" in stopped_by_sigterm(program)
    assert complete(out) == [0] and steps(out) == [0]
    resume(start, out, 1)
    assert steps(out) == [0, 1] and complete(out)[-1] == 1


@pytest.mark.slow
def test_sigterm_during_sft_saves_a_policy_that_train_starts_from(start, tmp_path):
    out = tmp_path / "cold"
    program = start(out, "sft.steps=100000", command="sft")
    wait_for(program, (out / "config.yaml").exists)
    output = stopped_by_sigterm(program)
    last = steps(out)[-1]
    assert f"stopped; step {last} is saved" in output and complete(out) == [last]
    assert sorted(load_policy(out).multipliers) == ["down_input", "expert_input", "k", "v"]


@pytest.mark.parametrize("mode", slow_but(["alternating"], MODES))
@pytest.mark.parametrize("moment", slow_but(["while one is written"], ["right after a checkpoint", "between two", "while one is written"]))
def test_kill_9_loses_the_steps_since_the_last_complete_checkpoint(start, tmp_path, moment, mode):
    out = tmp_path / "run"
    program = start(out, *MODES[mode])
    wait_for(program, lambda: len(complete(out)) > 1)
    reached = complete(out)[-1]
    if moment == "between two":
        wait_for(program, lambda: steps(out)[-1] > reached and steps(out)[-1] % EVERY == 1)
    elif moment == "while one is written":
        wait_for(program, lambda: saving(out), pause=0.0)
    program.kill()
    program.communicate(timeout=PATIENCE)
    assert program.returncode == -signal.SIGKILL
    last_complete, last_logged = complete(out)[-1], steps(out)[-1]
    # A save runs beside the next steps and ends before the next save begins, so the one before it is always complete.
    assert last_logged - last_complete <= 2 * EVERY

    resumed = start(out, *MODES[mode], "--resume")
    wait_for(resumed, lambda: read_metrics(out)[-1]["step"] == last_complete + 1)  # less than the killed run had reached, if it got far
    output = stopped_by_sigterm(resumed)
    last = steps(out)[-1]
    assert f"resumed after step {last_complete}" in output and f"stopped; step {last} is saved, go on with --resume" in output
    assert steps(out) == list(range(last + 1)) and complete(out)[-1] == last and not saving(out)
    assert violations(out) == []
