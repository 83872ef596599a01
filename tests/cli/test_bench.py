"""`bench`: rows on stdout as JSON or a table, and in a results file on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_jax.cli.app import main

COLUMNS = set(
    "op implementation shape dtype time_us bytes flops limit_share peer peer_time_us ratio target met device versions date".split()
)


def test_rows_as_json_and_in_the_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "dequantize", "--small", "--json", "--out", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and all(set(row) == COLUMNS and row["time_us"] > 0 and row["bytes"] > 0 for row in rows)
    assert json.loads((tmp_path / "benchmarks/results/cpu.json").read_text()) == rows
    assert [path.name for path in (tmp_path / "benchmarks/results").iterdir()] == ["cpu.json"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dequantize", "--small"]) == 0
    out = capsys.readouterr().out
    assert "dequantize" in out and "MB moved" in out and "device: cpu" in out


def test_unknown_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nonsense"]) == 2
    assert "unknown op nonsense" in capsys.readouterr().err
