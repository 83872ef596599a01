"""A disk that is full for real: a small file system in memory, in a mount namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.invariants import MODES, content, violations
from trace_jax.config import dump
from trace_jax.train.read_checkpoint import complete_steps
from trace_jax.train.run import run_training

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

BALLAST = """
import os
from pathlib import Path

class Ballast:
    "Files that leave room for `files` more, or for `size` more bytes."
    def __init__(self, folder):
        self.folder = Path(folder)
    def load(self, files=None, size=None):
        state = os.statvfs(self.folder)
        if files is not None:
            for number in range(state.f_ffree - files):
                (self.folder / f"ballast{number}").touch()
        else:
            (self.folder / "ballast").write_bytes(bytes(state.f_bavail * state.f_frsize - size))
    def drop(self):
        for path in self.folder.glob("ballast*"):
            path.unlink()
"""


@pytest.fixture
def in_small_disk(tmp_path, environment):
    """`in_small_disk(program)`: what the program prints. `DISK` in it is a file system of 64 MiB and 1000 files, copied to `disk`."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace: unshare --user --map-root-user --mount")
    mounted, kept = tmp_path / "mounted", tmp_path / "disk"
    mounted.mkdir()

    def run(program: str) -> str:
        (tmp_path / "program.py").write_text(f"{BALLAST}\nDISK = Path({str(mounted)!r})\nballast = Ballast(DISK)\n{program}")
        script = (
            f"mount -t tmpfs -o size=64m,nr_inodes=1000 none {mounted} && {sys.executable} {tmp_path}/program.py && cp -r {mounted} {kept}"
        )
        result = subprocess.run([*NAMESPACE, "sh", "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run


def test_a_disk_that_is_or_becomes_full_during_a_save(in_small_disk, tmp_path, cold_start):
    """Too few bytes show before the save begins, too few files only in the middle of it, folders and contents. The last checkpoint stays,
    room mends it, and the program ends at once."""
    said = in_small_disk(f"""
import optax
from trace_jax.errors import UserError
from trace_jax.train.checkpoint import Checkpoints, Progress, load_policy
from trace_jax.train.read_checkpoint import complete_steps
from trace_jax.train.state import TrainState
loaded = load_policy({str(cold_start.directory)!r})
state = TrainState(loaded.params, optax.adam(1.0).init(loaded.params), loaded.multipliers)
checkpoints = Checkpoints(DISK / "checkpoints")
def save(step):
    try:
        checkpoints.save(state, Progress(step=step), loaded.policy, "ascii", {{}})
        checkpoints.wait()
    except UserError as error:
        print(error)
    print(complete_steps(DISK / "checkpoints"))
save(1)
for room in ({{"size": 100_000}}, {{"files": 1}}, {{"files": 3}}, {{"files": 12}}):
    ballast.load(**room)
    save(2)
    ballast.drop()
save(2)
load_policy(DISK)
""").splitlines()
    line = f"{tmp_path}/mounted/checkpoints: no space left to save a checkpoint; free some space and go on with --resume"
    line += " (last complete checkpoint: step 1)"
    assert said == ["[1]", *[line, "[1]"] * 4, "[1, 2]"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_disk_fills_up_goes_on_where_the_last_checkpoint_was(in_small_disk, tmp_path, make_config, cold_start, mode):
    config = make_config(f"model.source={cold_start.directory}", "checkpoint.every=2", "steps=6", *MODES[mode])
    in_small_disk(f"""
import json
from trace_jax.config import from_mapping
from trace_jax.errors import UserError
from trace_jax.train.run import run_training
config = from_mapping(json.loads({json.dumps(config.model_dump(mode="json"))!r}))
def fill(step, metrics):
    if step == 4:
        ballast.load(files=12)
try:
    run_training(config, DISK / "run", report=fill)
except UserError as error:
    assert "no space left" in str(error) or "cannot be written (No space left" in str(error), error
else:
    raise AssertionError("the disk was not full")
ballast.drop()
assert run_training(config, DISK / "run", resume=True).metrics
""")
    run = tmp_path / "disk" / "run"
    assert violations(run) == [] and complete_steps(run / "checkpoints")[-1] == 6
    if mode == "alternating":
        run_training(config, tmp_path / "undisturbed")
        assert content(run) == content(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_ends_both_processes_of_a_run(in_small_disk, make_config, cold_start, tmp_path):
    """Whichever of them finds no room, in a row, an answer or its part of a checkpoint: none waits for the other one."""
    config = make_config(f"model.source={cold_start.directory}", "checkpoint.every=2", "steps=100000", "eval.every=0", "mesh.data=2")
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    said = in_small_disk(f"""
import json, time
from tests.sharding.test_processes import start_two
programs = start_two(dict(os.environ), ["-m", "trace_jax", "train", {str(file)!r}, "--out", str(DISK / "run")])
rows = DISK / "run" / "metrics.jsonl"
while not rows.exists() or len(rows.read_text().splitlines()) < 3:
    assert all(program.poll() is None for program in programs)
    time.sleep(0.05)
ballast.load(files=12)
begun = time.monotonic()
errors = [program.communicate(timeout=100)[1][-2000:] for program in programs]
print(json.dumps([[program.returncode for program in programs], errors, time.monotonic() - begun]))
ballast.drop()
""")
    codes, errors, seconds = json.loads(said.splitlines()[-1])
    assert sorted(codes) in ([1, 2], [2, 2]) and seconds < 60, (codes, errors)
    assert all("no space left" in error.lower() or "error: process" in error for error in errors)
