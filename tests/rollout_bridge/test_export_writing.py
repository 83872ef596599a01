"""An export is whole or absent, needs the memory of one layer, and refuses what it cannot do before it writes."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from exported_policy import random_params, save

from rollout_bridge.export import ExportSettings, export_checkpoint, run
from rollout_bridge.export.layout import TensorSpec
from rollout_bridge.export.shards import ShardWriter
from trace_jax.errors import UserError
from trace_jax.models.registry import Params
from trace_jax.models.tensor_files import TensorFiles
from trace_jax.quantization.plan import SITES
from trace_jax.train.stored_policy import open_stored_policy


def test_an_existing_target_is_refused_and_not_touched(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "link", "empty"):
        with pytest.raises(UserError, match=f"{name} exists; choose another folder"):
            export_checkpoint(run_folder, tmp_path / name, ExportSettings("bf16"))
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "empty"} and (tmp_path / "file").read_text() == "kept"


def test_an_interrupted_export_leaves_nothing(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run.encoded_tensors

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield from itertools.islice(whole(*arguments), 20)
        assert [path.name[: len("out.partial-")] for path in tmp_path.iterdir()] == ["out.partial-"]
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "encoded_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(run_folder, tmp_path / "out", ExportSettings("bf16"))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from rollout_bridge.export import ExportSettings, export_checkpoint, run
whole = run.encoded_tensors
def killed(*arguments):
    yield from itertools.islice(whole(*arguments), 20)
    os.kill(os.getpid(), signal.SIGKILL)
run.encoded_tensors = killed
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), ExportSettings("bf16"))
"""


def test_a_killed_export_is_not_mistaken_for_a_finished_one(run_folder: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", KILLED, str(run_folder), str(tmp_path / "out")]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.partial-") and not (left / "config.json").exists() and list(left.glob("*.safetensors"))
    export_checkpoint(run_folder, tmp_path / "out", ExportSettings("bf16"), verify=True)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_tensor_that_is_missing_ends_the_export(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run.encoded_tensors
    monkeypatch.setattr(run, "encoded_tensors", lambda *arguments: itertools.islice(whole(*arguments), 83))
    with pytest.raises(ValueError, match="incomplete: lm_head.weight"):
        export_checkpoint(run_folder, tmp_path / "out", ExportSettings("bf16"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fmt", "bad"), [("nvfp4", np.nan), ("mxfp4", np.inf), ("bf16", 3.4e38)])
def test_exp_12_a_weight_that_is_not_finite_is_named(masters: Params, tmp_path: Path, fmt: str, bad: float) -> None:
    experts = masters["groups"][0]["experts"]
    damaged = masters | {"groups": {0: masters["groups"][0] | {"experts": experts | {"down": experts["down"].copy()}}}}
    damaged["groups"][0]["experts"]["down"][1, 4, 3, 5] = bad
    scales = {site: np.ones(3, np.float32) for site in SITES}
    folder = save(tmp_path / "run", damaged, scales)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.experts\.4\.down_proj\.weight holds NaN, infinity"):
        export_checkpoint(folder, tmp_path / "out", ExportSettings(fmt))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("bad", [0.0, np.nan, -1.0])
def test_a_multiplier_that_is_no_scale_is_named(tmp_path: Path, bad: float) -> None:
    scales = {site: np.ones(3, np.float32) for site in SITES}
    scales["down_input"][1] = bad
    folder = save(tmp_path / "run", random_params(), scales)
    with pytest.raises(UserError, match="multiplier of down_input in layer 1 is"):
        export_checkpoint(folder, tmp_path / "out", ExportSettings("nvfp4"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused(run_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    victim = max((folder / "checkpoints" / "0" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        export_checkpoint(folder, tmp_path / "out", ExportSettings("bf16"))
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_refused_first(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1_000_000))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"out needs 68 MB and .* has 1 MB free; free some space"):
        export_checkpoint(run_folder, tmp_path / "a" / "out", ExportSettings("bf16"))
    assert list(tmp_path.iterdir()) == []


def test_a_slice_of_a_stored_parameter_is_the_parameter(run_folder: Path, masters: Params) -> None:
    stored = open_stored_policy(run_folder)
    for name, whole in masters["groups"][0]["experts"].items():
        np.testing.assert_array_equal(stored.params.read(("groups", 0, "experts", name), (2,)), whole[2])
        np.testing.assert_array_equal(stored.params.read(("groups", 0, "experts", name), (1, 4)), whole[1, 4])
    np.testing.assert_array_equal(stored.params.read(("embed", "weight")), masters["embed"]["weight"])
    assert stored.params.num_bytes == 4 * sum(leaf.size for leaf in jax.tree.leaves(masters))


def test_exp_18_offsets_beyond_two_gigabytes(tmp_path: Path) -> None:
    """Files are planned first and filled by position, so a large one costs nothing until its tensors come."""
    plan = [TensorSpec("large", "U8", (3_000_000_000,)), TensorSpec("small", "U8", (16,)), TensorSpec("wide", "F32", (4,))]
    writer = ShardWriter(tmp_path, plan, 10_000_000_000)
    writer.write("small", np.arange(16, dtype=np.uint8))
    writer.write("wide", np.arange(4, dtype=np.float32))
    with pytest.raises(ValueError, match="incomplete: large"), writer:
        pass
    with TensorFiles(tmp_path) as files:
        np.testing.assert_array_equal(files.read("wide"), np.arange(4, dtype=np.float32))
    data = np.memmap(tmp_path / "model.safetensors", np.uint8, "r")
    np.testing.assert_array_equal(data[-16:], np.arange(16, dtype=np.uint8))
    assert data.size > 2**31
    header = json.loads(bytes(data[8 : 8 + int.from_bytes(bytes(data[:8]), "little")]))
    assert [header[name]["data_offsets"][0] for name in ("wide", "large")] == [0, 16]  # wide types first: they stay aligned


@pytest.mark.parametrize(
    ("name", "tensor", "line"),
    [
        ("a", np.zeros(3, np.uint8), r"a is uint8 \(3,\) where BF16 \(3,\) was planned"),
        ("a", np.zeros(4, ml_dtypes.bfloat16), r"a is bfloat16 \(4,\) where"),
        ("b", np.zeros(3, ml_dtypes.bfloat16), "b came twice or is not in the plan"),
    ],
)
def test_a_tensor_that_was_not_planned_is_refused(tmp_path: Path, name: str, tensor: np.ndarray, line: str) -> None:
    with pytest.raises(ValueError, match=line), ShardWriter(tmp_path, [TensorSpec("a", "BF16", (3,))], 100) as writer:
        writer.write(name, tensor)
