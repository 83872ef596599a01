"""Several processes: how they find each other, and what two of them do together on CPUs (gloo)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.sharding import processes
from trace_jax.sharding.processes import Launch, launch_of

FOLDER = Path(__file__).parent
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "trainer-0.trainer:1234", "JAX_NUM_PROCESSES": "4"}
SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SECONDS = 280


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        (EXPLICIT | {"JAX_PROCESS_ID": "3"}, Launch("trainer-0.trainer:1234", 4, 3)),
        (EXPLICIT | {"JOB_COMPLETION_INDEX": "2"}, Launch("trainer-0.trainer:1234", 4, 2)),  # an indexed Job
        (EXPLICIT | {"JAX_PROCESS_ID": "0", "JOB_COMPLETION_INDEX": "2"}, Launch("trainer-0.trainer:1234", 4, 0)),
        ({"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # runs that have nothing to do with each other
        (SLURM | {"SLURM_STEP_NODELIST": "gpu7,gpu9"}, Launch("gpu7:61441", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[007-012,020],cpu1"}, Launch("gpu007:61441", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[7,9]"}, Launch("gpu7:61441", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "login,gpu[1-2]"}, Launch("login:61441", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu7", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (SLURM, None),  # inside of an allocation, without srun
    ],
)
def test_who_is_who(environment, launch):
    assert launch_of(environment) == launch


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is not; set it"),
        (EXPLICIT, "JAX_PROCESS_ID (or JOB_COMPLETION_INDEX) is not; set it"),
        (EXPLICIT | {"JAX_PROCESS_ID": "4"}, "process 4 of 4 cannot be; number the processes from 0 to 3"),
        (EXPLICIT | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID is 'first'; write a number"),
        (EXPLICIT | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "trainer-0"}, "write host:port"),
    ],
)
def test_half_of_a_description_is_refused(environment, part):
    with pytest.raises(UserError) as caught:
        launch_of(environment)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_parts_cover_everything_once(monkeypatch):
    for count in (1, 2, 3, 8):
        monkeypatch.setattr(processes.jax, "process_count", lambda count=count: count)
        for things in (0, 1, 7, 8, 9):
            parts = []
            for index in range(count):
                monkeypatch.setattr(processes.jax, "process_index", lambda index=index: index)
                parts.append(range(things)[processes.own_part(things)])
            assert [thing for part in parts for thing in part] == list(range(things))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def start_two(environment: dict[str, str], arguments: Sequence[str], devices: int = 1) -> list[subprocess.Popen[str]]:
    """Two processes of one run, on a port of this host that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # also as a slow test: what is compared is not the compiler
    shared = environment | quick | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": flags}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=shared | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (0, 1)
    ]


def outputs_of(programs: Sequence[subprocess.Popen[str]], code: int = 0) -> list[tuple[str, str]]:
    """What the processes print and report, once they have ended as they should."""
    try:
        found = [program.communicate(timeout=SECONDS) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [code, code], [error[-3000:] for _, error in found]
    return found


def test_two_processes_generate_agree_and_train_a_step(environment):
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs_of(start_two(environment, [str(FOLDER / "two_processes.py")]))]
    for index, result in enumerate(found):
        assert result["gathered"] and result["parts"] == [[0, 2], [2, 5]] and result["first"] == [True, False]
        assert result["error"] == ("no room" if index else "process 1: no room")
        assert "7 devices, but 2 are there" in result["error of the first"]
        assert result["disagreement"].startswith("process 1 has seed 4 and process 0 3;")
        # Each generates its part, both get the answers of one engine; each holds half of the experts.
        assert result["generated"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and result["tokens"] and result["logprobs"] < 1e-5
        assert result["bytes"] and result["own experts"]
        assert result["gradient"] < 5e-6 and result["logp"] < 5e-6 and result["params"] < 2e-4


def test_what_one_process_meets_ends_both(environment, tmp_path):
    programs = start_two(environment, [str(FOLDER / "faults_of_one.py"), str(tmp_path)])
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs_of(programs))
    assert first["chunks"] and second["chunks"]
    assert second["unpicklable"] == "MemoryError: no room for a copy" and "process 1 cannot send" in first["unpicklable"]
    assert second["update"] == "ValueError: no room for the second layer"
    assert first["update"] == "RuntimeError: process 1: no room for the second layer"
    assert first["poll"] == "MemoryError: no room for a wave" and second["poll"] == "RuntimeError: process 0: no room for a wave"
    assert [(found["after"], found["served"]) for found in (first, second)] == [(2, 8)] * 2
    assert second["reward"] == "UserError: task.reward math needs math-verify"
    assert first["reward"] == "UserError: process 1: task.reward math needs math-verify"
    for what in ("record", "answers", "begin"):
        kind, _, text = first[what].partition(": ")
        assert second[what] == f"UserError: process 0: {text}", (what, kind)
    assert "No space left" in first["record"]


def metrics_of(out: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))} for row in read_metrics(out)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_in_two_processes_is_the_command_in_one(environment, train, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    texts = outputs_of(start_two(environment, train(two, "steps=2", "mesh.data=2", "mesh.fsdp=2"), devices=2))
    assert "step     2" in texts[0][1] and "step" not in texts[1][1] + texts[1][0].replace("[Gloo]", "")  # one reports
    subprocess.run([sys.executable, *train(one, "steps=2")], env=environment, check=True, capture_output=True, timeout=SECONDS)
    for row, alone in zip(metrics_of(two), metrics_of(one), strict=True):
        assert row.keys() == alone.keys()
        for name, value in row.items():
            assert value == pytest.approx(alone[name], rel=1e-3, abs=1e-5, nan_ok=True) if isinstance(value, float) else True, name
    for step in (1, 2):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert [row["completion"] for row in map(json.loads, (two / name).read_text().splitlines())] == [
            row["completion"] for row in map(json.loads, (one / name).read_text().splitlines())
        ]
    again = [*train(two, "steps=3"), "--resume"]  # what two saved, one goes on with
    subprocess.run([sys.executable, *again], env=environment, check=True, capture_output=True, timeout=SECONDS)
    assert [row["step"] for row in read_metrics(two)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_stops_both_and_a_refusal_of_the_first_refuses_both(environment, train, tmp_path):
    out = tmp_path / "run"
    programs = start_two(environment, train(out, "steps=100000", "mesh.data=2", "eval.every=0", "checkpoint.every=100000"))
    deadline = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or not read_metrics(out):
        assert time.monotonic() < deadline and all(program.poll() is None for program in programs)
        time.sleep(0.1)
    os.kill(programs[1].pid, signal.SIGTERM)
    texts = outputs_of(programs)
    saved = sorted(int(path.name) for path in (out / "checkpoints").iterdir())
    assert saved[-1] == metrics_of(out)[-1]["step"] and f"stopped; step {saved[-1]} is saved" in texts[0][1]
    refused = outputs_of(start_two(environment, train(out, "steps=1", "mesh.data=2")), code=2)
    assert "is not empty; add --resume" in refused[0][1] and "process 0: " in refused[1][1]
    assert np.all(np.diff([row["step"] for row in metrics_of(out)]) == 1)
