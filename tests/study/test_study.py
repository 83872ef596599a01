"""The study's page from its logs, and the logs from runs."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import JsonlWriter
from trace_jax.study.__main__ import LOGS, PAGE, app
from trace_jax.study.curves import BIN

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty checkout with the page alone."""
    (tmp_path / "docs" / "images").mkdir(parents=True)
    shutil.copy(ROOT / PAGE, tmp_path / PAGE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*words):
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def run(folder, name, steps, offset=0.0, **more):
    (folder / name).mkdir(parents=True)
    writer = JsonlWriter(folder / name / "metrics.jsonl")
    for step in range(1, steps + 1):
        row = {"reward/mean": step / 1000 + offset, "reward/pass_rate": step / 2000, "rollout_corr/k3_kl": 1e-3} | more
        writer.write(step, row | ({"unguided/rollout_corr/k3_kl": 2e-3} if name.startswith("trace") and step % 10 == 0 else {}))
    writer.close()


def block(name):
    text = PAGE.read_text()
    start = text.index(f"<!-- study {name} -->\n")
    return text[start : text.index("<!-- end -->", start)].splitlines()[1:]


def test_collect_and_render(here):
    """Runs of several comparisons, of different lengths, in one table; what is not measured says so; rendering twice changes nothing."""
    run(here / "runs" / "one", "trace-seed-0", 120)
    run(here / "runs" / "two", "trace-seed-1", 110)
    run(here / "runs" / "two", "qat-seed-0", 130, offset=0.5)
    invoke("collect", here / "runs")
    curves = json.loads((LOGS / "curves.json").read_text())
    series = curves["trace"]["reward/mean"]
    assert [one["seed"] for one in series] == [0, 1] and series[0]["steps"] == list(range(BIN, 121, BIN))
    assert series[0]["values"][0] == pytest.approx(sum(range(1, BIN + 1)) / BIN / 1000)
    assert "unguided/rollout_corr/k3_kl" not in curves["qat"]
    invoke("render")
    lines = block("training")
    assert "steps 61 to 110" in lines[0]  # the last steps that all runs have
    assert lines[3].startswith("| trace | 1 | 0.026 | 0.085 |") and lines[3].endswith("| 1.0e-03 | 2.0e-03 |")
    assert lines[4].startswith("| qat | 0 | 0.525 | 0.585 |") and lines[4].endswith("| 1.0e-03 | - |")
    assert block("layers") == ["Not measured yet."]
    assert (here / "docs" / "images" / "study-training.png").read_bytes().startswith(b"\x89PNG")
    before = PAGE.read_text()
    invoke("render")
    assert PAGE.read_text() == before


def test_records_of_older_weights(here):
    name = "guidance/audit/adjacent_share/k/layer_{}/gap_{}"
    aged = {name.format(layer, age): 0.9 + layer / 100 - age / 10 for layer in (0, 1, 2) for age in (0, 2)}
    run(here, "aged-seed-0", 3, **aged)
    invoke("collect", here, "--aged", here / "aged-seed-0")
    assert json.loads((LOGS / "versions.json").read_text()) == {"0": {"adjacent_share": 0.91}, "2": {"adjacent_share": 0.71}}


def test_the_page_is_that_of_its_logs(here):
    """The committed page shows the committed logs."""
    shutil.copytree(ROOT / LOGS, LOGS)
    before = PAGE.read_text()
    invoke("render")
    assert PAGE.read_text() == before


def test_seeds_of_which_only_one_was_measured_unguided(here):
    """Runs shorter than the windows, of which the first has no unguided KL: it gets a dash, not the figure of the other seed."""
    run(here / "runs", "trace-seed-0", 5)
    run(here / "runs", "trace-seed-1", 20)
    invoke("collect", here / "runs")
    invoke("render")
    lines = block("training")
    assert "steps 1 to 5" in lines[0]
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["0", "1"]
    assert lines[2].endswith("| 1.0e-03 | - |") and lines[3].endswith("| 1.0e-03 | - |")  # seed 1 was measured after step 5


def test_nothing_to_render(here):
    with pytest.raises(UserError, match="no curves.json; run `python -m trace_jax.study collect RUNS`"):
        invoke("render")
