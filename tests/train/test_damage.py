"""A checkpoint is restored as it was saved or refused in one line that names the file and the way out; older ones still load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from trace_jax.config.schema import OptimizerConfig
from trace_jax.errors import UserError
from trace_jax.train.checkpoint import Checkpoints, Progress, load_policy
from trace_jax.train.manifest import MANIFEST
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.state import TrainState

OPTIMIZER = make_optimizer(OptimizerConfig())
ITEMS = ("params", "optimizer", "multipliers", "meta")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, cold_start) -> Path:
    """A folder with checkpoints of steps 3 and 5."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    loaded = load_policy(cold_start.directory)
    state = TrainState(loaded.params, OPTIMIZER.init(loaded.params), loaded.multipliers)
    checkpoints = Checkpoints(directory)
    for step in (3, 5):
        checkpoints.save(state, Progress(step=step, samples=8), loaded.policy, loaded.tokenizer, {})
    checkpoints.close()
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restore(directory: Path, step: int = 5) -> TrainState:
    checkpoints = Checkpoints(directory)
    try:
        return checkpoints.restore(step, OPTIMIZER)[1]
    finally:
        checkpoints.close()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, share: float, bit: int = 1) -> None:
    """Changes one bit at a share of the file's length."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_ckpt_07_09_a_damaged_checkpoint_is_named(copy, item, damage):
    step = copy / "5"
    if damage == "missing":
        shutil.rmtree(step / item)
    else:
        for file in files_of(step / item):
            truncate(file)
    with pytest.raises(UserError) as caught:
        restore(copy)
    line = str(caught.value)
    assert line.startswith(f"{step}: {item}/") and "\n" not in line and len(line) < 250 + 2 * len(str(step))
    assert line.endswith(f"; remove the folder {step} to go on from step 3")
    shutil.rmtree(step)
    restore(copy, 3)


def test_the_only_checkpoint_is_not_to_be_deleted(copy):
    shutil.rmtree(copy / "3")
    shutil.rmtree(copy / "5" / "optimizer")
    with pytest.raises(UserError, match="there is no other checkpoint in .*, start again") as caught:
        restore(copy)
    assert "remove" not in str(caught.value)
    load_policy(copy)  # the weights do not need the optimizer


def test_a_flipped_bit_anywhere_is_found(copy, saved):
    """Every file, at its start, at its end and inside; Orbax itself would restore wrong numbers for some of these."""
    files = [path for item in ITEMS for path in files_of(copy / "5" / item)]
    assert len(files) > 20
    for path in files:
        for share in (0.0, 0.37, 1.0):
            flip(path, share)
            with pytest.raises(UserError, match=f"{path.name} is damaged"):
                restore(copy)
            flip(path, share)
    jax.tree.map(np.testing.assert_array_equal, restore(copy), restore(saved))


@pytest.mark.parametrize("share", [0.0, 0.31, 0.62, 1.0])
def test_a_damaged_manifest_never_lets_a_wrong_file_pass(copy, saved, share):
    flip(copy / "5" / MANIFEST, share)
    try:
        jax.tree.map(np.testing.assert_array_equal, restore(copy), restore(saved))
    except UserError as error:
        assert str(copy / "5") in str(error)


def test_an_unreadable_manifest_is_named(copy):
    truncate(copy / "5" / MANIFEST)
    with pytest.raises(UserError, match=r"5: manifest\.json is damaged"):
        restore(copy)


def test_a_checkpoint_without_its_manifest_is_damaged(copy):
    (copy / "5" / MANIFEST).unlink()
    with pytest.raises(UserError, match=f"{MANIFEST} is missing; remove the folder"):
        restore(copy)


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_but_our_line_is_printed(copy, damaged):
    """Plain Python, no settings of ours: neither notices of Orbax, nor what its storage prints behind an error."""
    if damaged:
        for file in files_of(copy / "5" / "params"):
            truncate(file)
    program = f"""
from trace_jax.errors import UserError
from trace_jax.train.checkpoint import load_policy
try:
    print(load_policy({str(copy)!r}).policy.family)
except UserError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.count("\n") == 1 and ("remove the folder" if damaged else "qwen3_moe") in result.stdout
