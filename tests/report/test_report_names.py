"""Where `trace-jax report` writes: a comparison never takes the name of a run's own page."""

import json

import pytest

from trace_jax.cli.app import main


@pytest.mark.slow
def test_a_comparison_leaves_the_page_of_its_first_run(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/step": 1.0}) + "\n")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["report", first]) == 0
    assert capsys.readouterr().out == f"report: {first}/report.html\n"
    page = (tmp_path / "first" / "report.html").read_bytes()
    assert main(["report", first, second]) == 0
    assert capsys.readouterr().out == f"report: {first}/comparison.html\n"
    names = ["comparison.html", "comparison.png", "metrics.jsonl", "report.html", "report.png"]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == names
    assert (tmp_path / "first" / "report.html").read_bytes() == page
