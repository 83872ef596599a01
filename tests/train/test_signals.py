"""Stopping the program from outside: SIGTERM ends it cleanly, kill -9 costs at most the steps since the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml

from trace_jax.metrics.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EVERY = 2
"""Steps from one checkpoint to the next."""

PATIENCE = 240.0
"""Seconds until a started program must have done what is waited for; compiling takes long on a busy machine."""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, values, cold_start):
    values["model"]["source"] = str(cold_start.directory)
    values |= {
        "eval": {"every": 0, "max_prompts": 2},
        "guidance": {"audit": {"every": 0}},
        "checkpoint": {"every": EVERY},
        "steps": 100_000,
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(config_file: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 1024**3),
    }
    command = [sys.executable, "-m", "trace_jax", "train", str(config_file), *arguments, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(out: Path) -> list[int]:
    return [row["step"] for row in read_metrics(out)] if (out / "metrics.jsonl").exists() else []


def complete(out: Path) -> list[int]:
    folder = out / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def wait_for(program: subprocess.Popen[str], condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if program.poll() is not None or time.monotonic() > deadline:
            program.kill()
            pytest.fail(f"the program ended or hangs:\n{program.communicate()[0][-3000:]}")
        time.sleep(0.02)


def resume(config_file: Path, out: Path, last: int) -> None:
    program = start(config_file, out, f"steps={last}", "--resume")
    output = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, output[-3000:]


def test_sigterm_saves_and_exits_0_and_the_run_goes_on(config_file, tmp_path):
    out = tmp_path / "run"
    program = start(config_file, out)
    wait_for(program, lambda: len(steps(out)) > 3)
    program.send_signal(signal.SIGTERM)
    output = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, output[-3000:]
    stopped = steps(out)[-1]
    assert complete(out)[-1] == stopped  # the step in progress was finished and saved, whatever checkpoint.every is
    resume(config_file, out, stopped + 2)
    assert steps(out) == list(range(stopped + 3)) and complete(out)[-1] == stopped + 2


def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(config_file, tmp_path):
    """Two kills at different moments of one run; each resumed run goes on from the last complete checkpoint."""
    out = tmp_path / "run"
    for number, delay in enumerate((0.0, 0.274)):
        reached = len(complete(out)) and complete(out)[-1]
        program = start(config_file, out, *(["--resume"] if number else []))
        wait_for(program, lambda reached=reached: bool(complete(out)) and complete(out)[-1] > reached)
        time.sleep(delay)
        program.kill()
        program.communicate(timeout=PATIENCE)
        assert program.returncode == -signal.SIGKILL
    last_complete, last_logged = complete(out)[-1], steps(out)[-1]
    # A save runs beside the next steps and ends before the next save begins: two intervals at most, of which one is in flight.
    assert last_logged - last_complete <= 2 * EVERY
    resume(config_file, out, last_logged + 1)
    assert steps(out) == list(range(last_logged + 2))
    assert complete(out)[-1] == last_logged + 1
    for step in range(1, last_logged + 2):
        rows = (out / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert [json.loads(row)["sample_id"] for row in rows] == list(range(8 * (step - 1), 8 * step))
