"""`trace-jax export` from the outside: found by its entry point, one line per user error, JSON alone on stdout."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from exported_policy import multipliers, random_params, save

from trace_jax.cli import app
from trace_jax.train.stored_policy import StoredPolicy

ROOT = Path(__file__).resolve().parent.parent.parent
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["trace_jax.commands"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of this tree, whichever version is installed."""
    points = [EntryPoint(name, value, "trace_jax.commands") for name, value in DECLARED.items()]
    monkeypatch.setattr(app, "entry_points", lambda group, **_: points)


def test_the_entry_point_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    assert " export " in capsys.readouterr().out
    assert app.main(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("RUN_OR_CHECKPOINT", "OUT", "--format", "--scope", "--declare-kv", "--activations", "--verify", "--json"):
        assert word in shown


def test_json_reports_sizes_time_and_memory(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(run_folder), str(tmp_path / "out"), "--declare-kv", "nvfp4", "--verify", "--json"]
    assert app.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert result["bytes_written"] < written < result["bytes_written"] + 200 * result["tensors"]
    assert result["bytes_written"] < result["bytes_bf16"] < result["bytes_float32"]
    assert result["memory_peak_bytes"] >= result["memory_before_bytes"] > 0 and result["seconds"] > 0
    assert result["values_verified"] > 0 and result["kv_cache_declared"] == "nvfp4" and not result["calibrated_now"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]["num_bits"] == 4


def test_a_person_reads_sizes_and_what_was_verified(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["export", str(run_folder), str(tmp_path / "out"), "--format", "mxfp4", "--verify"]) == 0
    shown = capsys.readouterr()
    assert "0.23 MB in mxfp4 (BF16: 0.40 MB)" in shown.out and "values decode to what the trainer computes with" in shown.out
    assert "trained for a rollout in nvfp4; mxfp4 is quantization after training" in shown.out
    assert "writing 0.2 MB to" in shown.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{run}", "{run}"], "exists; choose another folder, nothing is overwritten"),
        (["{tmp}/absent", "{tmp}/out"], "absent: no such file or directory; give a run directory or a checkpoint"),
        (["{tmp}", "{tmp}/out"], "neither a run directory"),
        (["{run}", "{tmp}/out", "--format", "fp8"], "--format fp8 is unknown; write one of nvfp4, mxfp4, bf16"),
        (["{run}", "{tmp}/out", "--scope", "routed_experts:9"], "--scope is [9], but the model has 3 layers"),
        (["{run}", "{tmp}/out", "--format", "bf16", "--declare-kv", "nvfp4"], "--declare-kv nvfp4 needs --format nvfp4"),
        (["{run}"], "Missing argument 'OUT'"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], line: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["export", *(word.format(run=run_folder, tmp=tmp_path) for word in words)]) == 2
    shown = capsys.readouterr()
    errors = [text for text in shown.err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and line in errors[0] and "Traceback" not in shown.err and shown.out == ""
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_was_never_calibrated_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollout_bridge.export import run

    folder = save(tmp_path / "run", random_params(), {})
    asked: list[tuple[Path, str | None]] = []

    def calibrated_on(stored: StoredPolicy, settings: object, task: str | None, overrides: object) -> dict[str, np.ndarray]:
        asked.append((stored.folder, task))
        return {site: np.asarray(values) for site, values in multipliers().items()}

    monkeypatch.setattr(run, "_multipliers", calibrated_on)
    words = ["export", str(folder), str(tmp_path / "out"), "--task", "reasoning_gym:spell_backward", "--json"]
    assert app.main(words) == 0 and asked == [(folder / "checkpoints" / "0", "reasoning_gym:spell_backward")]
    shown = capsys.readouterr()
    assert json.loads(shown.out)["calibrated_now"] is True and "calibrating down_input, expert_input, k, v" in shown.err
    assert app.main(["export", str(folder), str(tmp_path / "bf16"), "--format", "bf16"]) == 0 and len(asked) == 1


def test_the_tokenizer_of_an_imported_checkpoint_is_carried_over(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", random_params(), multipliers(), tokenizer="tokenizer")
    words = ["export", str(folder), str(tmp_path / "out"), "--format", "bf16"]
    assert app.main(words) == 2  # the folder is gone
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
        (folder / "tokenizer" / name).write_text(f"{{}} {name}")
    assert app.main(words) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.json")}
    assert written["tokenizer.json"] == "{} tokenizer.json" and written["generation_config.json"] == "{} generation_config.json"
    assert not (tmp_path / "out" / "notes.txt").exists()


@pytest.mark.parametrize("value", ["absent_package.export:export", "json:no_such_function"])
def test_a_broken_entry_point_is_one_clear_line(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    point = EntryPoint("other", value, "trace_jax.commands")
    monkeypatch.setattr(app, "entry_points", lambda group, **_: [point])
    assert app.main(["other", "x", "--y", "3"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: command other: the entry point {value} of its package cannot be loaded (") and shown.count("\n") == 1
    assert app.main(["--help"]) == 0  # the other commands do not suffer
    assert "Broken: reinstall" in capsys.readouterr().out
