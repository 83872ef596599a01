"""`bench`: rows on stdout as JSON or a table, in a results file on request, and from there into the document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_jax.cli.app import main

COLUMNS = set(
    "op implementation shape dtype time_us bytes flops limit_share peer peer_time_us ratio target met device versions date".split()
)


def test_rows_as_json_in_the_results_file_and_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "dequantize", "--small", "--json", "--out", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and all(set(row) == COLUMNS and row["time_us"] > 0 and row["bytes"] > 0 for row in rows)
    assert json.loads((tmp_path / "benchmarks/results/cpu.json").read_text()) == rows
    assert [path.name for path in (tmp_path / "benchmarks/results").iterdir()] == ["cpu.json"]

    assert main(["bench", "--render", "cpu"]) == 2
    assert "docs/performance.md does not exist" in capsys.readouterr().err
    document = tmp_path / "docs/performance.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- benchmark cpu -->\nold\n<!-- end -->\nafter\n")
    assert main(["bench", "--render", "cpu"]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert text.count("\n| dequantize/") == len(rows)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dequantize", "--small"]) == 0
    out = capsys.readouterr().out
    assert "dequantize/nvfp4, pallas (interpreted)" in out and "GB/s" in out and "of jnp reference" in out and "device: cpu" in out


def test_unknown_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nonsense"]) == 2
    err = capsys.readouterr().err
    assert "unknown op nonsense" in err and "decode_attention" in err and "training_step" in err


def test_render_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dequantize", "--render", "cpu"]) == 2
    assert "--render times nothing" in capsys.readouterr().err
