"""The commands on a mesh: the same run as on one device, and one that goes on under another mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trace_jax.metrics.jsonl import read_metrics

SECONDS = 280
MESH = ("mesh.data=-1", "mesh.fsdp=2", "mesh.expert=2")


@pytest.fixture
def program(eight_devices, config_file):
    """`program("train", out, ...)` runs a command on eight devices and returns what it says."""

    def run(command: str, out: Path, *arguments: str, code: int = 0) -> str:
        words = [sys.executable, "-m", "trace_jax", command, str(config_file), *arguments, "--out", str(out)]
        environment = eight_devices | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == code, done.stderr[-3000:]
        return done.stderr

    return run


def assert_close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for row, alone in zip(one, other, strict=True):
        assert row.keys() == alone.keys()
        for name, value in row.items():
            if isinstance(value, float) and not name.startswith(("time/", "throughput/")):
                assert value == pytest.approx(alone[name], rel=1e-3, abs=1e-5, nan_ok=True), name


def completions(out: Path, step: int) -> list[str]:
    return [json.loads(line)["completion"] for line in (out / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_on_a_mesh_is_the_run_on_one_device(program, tmp_path):
    for command, steps in (("sft", "sft.steps=3"), ("train", "steps=2")):
        program(command, tmp_path / command, steps)
        program(command, tmp_path / f"{command}-mesh", steps, *MESH)
        assert_close(list(read_metrics(tmp_path / f"{command}-mesh")), list(read_metrics(tmp_path / command)))
    for step in (1, 2):
        assert completions(tmp_path / "train-mesh", step) == completions(tmp_path / "train", step)
    said = program("train", tmp_path / "train-mesh", "steps=3", "mesh.fsdp=4", "mesh.tensor=2", "--resume")
    assert "resumed after step 2 with mesh.data -1 -> 1, mesh.fsdp 2 -> 4, mesh.expert 2 -> 1, mesh.tensor 1 -> 2" in said
    program("train", tmp_path / "train", "steps=3", "--resume")
    assert_close(list(read_metrics(tmp_path / "train-mesh")), list(read_metrics(tmp_path / "train")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compensated_channels_are_chosen_on_a_mesh(program, tmp_path):
    """QUADS: calibration, choice of channels and training, all with divided parameters."""
    quads = ("method=quads", "rollout.residual_compensation.fraction=0.5", "guidance.audit.every=0", "eval.every=0", "steps=1")
    for name, mesh in (("one", ()), ("mesh", MESH)):
        program("train", tmp_path / name, *quads, *mesh)
    assert_close(list(read_metrics(tmp_path / "mesh")), list(read_metrics(tmp_path / "one")))


def test_a_mesh_without_its_devices_leaves_nothing(environment, config_file, tmp_path):
    words = [sys.executable, "-m", "trace_jax", "train", str(config_file), "mesh.data=2", "--out", str(tmp_path / "run")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and "error: mesh: the axes data=2, fsdp=1, expert=1, tensor=1 take 2 devices" in done.stderr
    assert not (tmp_path / "run").exists()
