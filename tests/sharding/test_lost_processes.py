"""Processes of a run that are killed or fail alone: the others end soon, with one line that says which one, and the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharding.test_processes import SECONDS, start_two
from tests.train.invariants import violations
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.read_checkpoint import complete_steps

ALONE = """
import sys, time
from trace_jax.sharding.processes import join, gathered
join()
import jax
from trace_jax.sharding import lost_processes
from trace_jax.sharding.lost_processes import leave
lost_processes.GRACE_S = 2.0
me, how = jax.process_index(), sys.argv[1]
gathered(0)
print("joined", flush=True)
def end(code):
    leave(code)
    sys.exit(code)
if how == "all fail":
    end(2)
if how == "one is slower":
    time.sleep(3 * me)
    end(0)
if str(me) == how.split()[0]:
    if "raises" in how:
        raise ArithmeticError("out of numbers")
    end(2) if "fails" in how else time.sleep(100)
gathered(0)  # waits for the other one
"""


def started(environment, tmp_path: Path, how: str) -> list[subprocess.Popen[str]]:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    return start_two(environment, [str(program), how])


def ended(programs) -> tuple[list[int], list[str], float]:
    """Exit codes, what was said, and how long it took."""
    begun = time.monotonic()
    try:
        said = [program.communicate(timeout=60)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [program.returncode for program in programs], said, time.monotonic() - begun


@pytest.mark.parametrize("lost", [1, 0])
def test_kill_9_of_one_ends_the_other(environment, tmp_path, lost):
    """JAX ends the others of process 0 as well, with a page of text; whichever of the two comes first."""
    programs = started(environment, tmp_path, f"{lost} sleeps")
    for program in programs:
        assert program.stdout is not None and any("joined" in line for line in program.stdout)
    programs[lost].kill()
    codes, said, seconds = ended(programs)
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] not in (0, None) and seconds < 20
    line = f"error: process {lost} ({socket.gethostname()}) is lost, and this one cannot go on without it; start all processes again"
    assert line in said[1 - lost] or (lost == 0 and "JAX distributed service detected fatal errors" in said[1])


@pytest.mark.parametrize(("how", "failing", "code"), [("1 fails", 1, 2), ("0 raises", 0, 1)])
def test_an_error_of_one_that_others_wait_for(environment, tmp_path, how, failing, code):
    codes, said, _ = ended(started(environment, tmp_path, how))
    assert codes == [code if index == failing else 1 for index in (0, 1)]
    line = f"error: process {failing} ({socket.gethostname()}) ended with code {code}, and this one waited for it; its log says why"
    assert line in said[1 - failing] and "error: process" not in said[failing]
    assert how != "0 raises" or "out of numbers" in said[0]


@pytest.mark.parametrize(("how", "code"), [("all fail", 2), ("one is slower", 0)])
def test_an_end_that_all_come_to_is_left_alone(environment, tmp_path, how, code):
    codes, said, _ = ended(started(environment, tmp_path, how))
    assert codes == [code, code] and not any("error" in text for text in said)


UNHEARD = """
import os, socket, sys, time
from trace_jax.sharding.lost_processes import Watch
sys.stdout = os.fdopen(1, "w", buffering=4096)
here, there = socket.socketpair()
Watch(1, ["process 0", "process 1"], {0: here})
print("unread")
there.close()
time.sleep(10)
os._exit(7)
"""


@pytest.mark.parametrize("unread", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_process_that_nobody_reads_ends_as_well(environment, unread):
    """As in `trace-jax train 2>&1 | head`: what cannot be written must not keep the thread from ending the program."""
    reader, writer = os.pipe()
    os.close(reader)
    out, err = (writer if name in unread else subprocess.DEVNULL for name in ("stdout", "stderr"))
    try:
        assert subprocess.run([sys.executable, "-c", UNHEARD], env=environment, stdout=out, stderr=err, timeout=20).returncode == 1
    finally:
        os.close(writer)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [1, 0])
def test_a_run_that_lost_a_process_goes_on_from_its_checkpoint(environment, train, tmp_path, lost):
    """No prompt lost or trained twice; also where fewer processes resume than there were."""
    out = tmp_path / "run"
    programs = start_two(environment, train(out, "steps=100000", "mesh.data=2", "eval.every=0", "checkpoint.every=2"))
    deadline = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < 5:
        assert time.monotonic() < deadline and all(program.poll() is None for program in programs)
        time.sleep(0.1)
    programs[lost].kill()
    codes, _, seconds = ended(programs)
    assert codes[1 - lost] not in (0, None) and seconds < 30
    done = complete_steps(out / "checkpoints")[-1]
    assert 0 < done <= read_metrics(out)[-1]["step"]
    again = [*train(out, f"steps={done + 3}", "eval.every=0", "checkpoint.every=2"), "--resume"]
    subprocess.run([sys.executable, *again], env=environment, check=True, capture_output=True, timeout=SECONDS)
    assert violations(out) == [] and complete_steps(out / "checkpoints")[-1] == done + 3
