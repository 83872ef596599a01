import base64
import importlib.util
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.metrics import open_writers
from trace_jax.report import report
from trace_jax.report.sections import SECTIONS
from trace_jax.report.series import Run, load_runs
from trace_jax.report.style import moving_average
from trace_jax.report.summary import summary_table

# The maker of synthetic runs lies beside this file and is no test module, so it is loaded by path under any import mode.
_spec = importlib.util.spec_from_file_location("synthetic_runs", Path(__file__).with_name("synthetic.py"))
assert _spec is not None and _spec.loader is not None
synthetic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic)

PANELS = [panel.title for section in SECTIONS for panel in section.panels]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def trace_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "trace"
    synthetic.write_run(run, steps=40)
    return run


@pytest.fixture(scope="module")
def qat_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "qat"
    synthetic.write_run(run, steps=40, seed=1, guided=False)
    return run


class Page(HTMLParser):
    """Collects what the tests look at, and checks that tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.references, self.text = [], {}, [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.images[attributes["alt"]] = attributes["src"]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_one_self_contained_file_with_every_panel(trace_run, tmp_path):
    path = report([trace_run], tmp_path / "deep" / "report.html")
    text = path.read_text()
    page = Page(text)
    assert list(page.images) == PANELS
    assert all(source.startswith("data:image/png;base64,") for source in page.references)
    assert not re.search(r"https?://|<script|@import|url\(", text)
    for source in page.images.values():
        assert base64.b64decode(source.split(",")[1]).startswith(PNG)
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    # Nothing else is left in the folder.
    assert sorted(os.listdir(path.parent)) == ["report.html", "report.png"]


def test_summary_holds_the_recorded_figures(trace_run, qat_run):
    table = dict(summary_table(load_runs([trace_run, qat_run])))
    assert table["Method"] == ["trace", "qat"]
    assert table["Last step"] == ["40", "40"]
    assert table["Held-out pass@1 (validation), before → after"][0] == "0.180 [0.120, 0.240] → 0.750 [0.690, 0.810]"
    assert table["Record, bytes per token"] == ["232", "not recorded"]
    assert table["Time per step, median"][0] == "1.16 s"
    assert table["KL (k3) of the unguided forward, median"][1] == "not recorded"
    assert table["Audited code agreement, mean over layers and sites"][0].endswith("%")


@pytest.mark.slow
def test_several_runs_over_each_other(trace_run, qat_run, tmp_path):
    page = Page(report([trace_run, qat_run], tmp_path / "both.html").read_text())
    assert list(page.images) == PANELS
    text = "".join(page.text)
    assert "trace" in text and "qat" in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        with open_writers(tmp_path / parent / "run", []) as log:
            log.write(1, {"loss": 1.0})
    assert [run.name for run in load_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])] == ["a/run", "b/run"]
    # The same run twice is no reason to fail.
    assert len(load_runs([tmp_path / "a" / "run"] * 2)) == 2


@pytest.mark.parametrize(
    "row",
    [{"loss": 0.5}, {"loss": math.nan, "note": "text"}, {"eval/test/pass_at_1": 0.5}, {"time/step": 1.0}, {"rollout_corr/k3_kl": 0.0}],
)
def test_partial_metrics_are_enough(tmp_path, row):
    with open_writers(tmp_path / "<b>run</b>", []) as log:
        log.write(0, row)
    page = Page(report([tmp_path / "<b>run</b>"], tmp_path / "out.html").read_text())
    assert list(page.images) == PANELS
    assert "not recorded" in page.text


def axes_of(draw, runs):
    from trace_jax.report.style import new_figure, styled

    with styled():
        axes = new_figure(4, 3).subplots()
        draw(axes, runs)
    return axes


def panel(title):
    return next(panel for section in SECTIONS for panel in section.panels if panel.title == title)


@pytest.mark.parametrize("title", PANELS)
def test_an_empty_panel_says_so(title):
    axes = axes_of(panel(title).draw, [Run("run", [{"step": 1, "unknown": 1.0}])])
    assert [text.get_text() for text in axes.texts] == ["not recorded"]


def test_kl_of_zero_is_not_called_missing():
    key, unguided = "rollout_corr/k3_kl", "unguided/rollout_corr/k3_kl"
    zeros = [{"step": i, key: 0.0} for i in range(3)]
    axes = axes_of(panel("KL of rollout and trainer").draw, [Run("run", zeros)])
    assert axes.get_yscale() == "linear" and not axes.texts
    both = [row | {unguided: 1e-3} for row in zeros]
    axes = axes_of(panel("KL of rollout and trainer").draw, [Run("run", both, {"train_quant": {"kv_cache": "guided"}})])
    assert axes.get_yscale() == "log"
    assert axes.get_legend_handles_labels()[1] == ["guided forward: always 0", "unguided forward"]


def test_mis_07_the_curve_is_named_for_the_forward_and_the_summary_is_a_median():
    key = "rollout_corr/k3_kl"
    run = Run("run", [{"step": i, key: 1.0 if i == 3 else 1e-3} for i in range(9)])
    axes = axes_of(panel("KL of rollout and trainer").draw, [run])
    # A run without guidance must not be called guided.
    assert axes.get_legend_handles_labels()[1] == ["training forward, not guided"]
    audited = Run("run", [row | {"guidance/audit/code_agreement/k/layer_0": 0.5} for row in run.rows])
    assert not audited.guided()  # an audit is no guidance
    recorded = [row | {"guidance/bytes_per_token": 9.0} for row in run.rows]
    for rounding, guided in ((("rtn", "none"), False), (("guided", "rtn"), True), (("none", "guided"), True)):
        quant = dict(zip(("activations", "kv_cache"), rounding, strict=True))
        assert Run("run", recorded, {"train_quant": quant}).guided() is guided  # what follows the record counts, not that there is one
    # One outlier step does not move the median.
    assert dict(summary_table([run]))["KL (k3) of the forward that trains, median"] == ["1.00e-03 (not guided)"]


def test_curves_hold_the_recorded_values():
    run = Run("run", [{"step": i, "policy/entropy": float(i)} for i in (1, 2, 5)])
    (line,) = axes_of(panel("Policy entropy").draw, [run]).lines
    np.testing.assert_array_equal(line.get_xydata(), [[1, 1], [2, 2], [5, 5]])


def test_audit_uses_the_newest_value_of_each_layer():
    key = "guidance/audit/code_agreement/{}/layer_{}"
    run = Run(
        "run",
        [{"step": 0, key.format("k", 10): 0.1, key.format("k", 2): 0.2}, {"step": 1, key.format("k", 10): 0.3, key.format("v", 2): 0.4}],
    )
    assert run.audit("code_agreement") == {"k": {2: 0.2, 10: 0.3}, "v": {2: 0.4}}
    lines = axes_of(panel("Audited code agreement").draw, [run]).lines
    np.testing.assert_array_equal(lines[0].get_xydata(), [[2, 0.2], [10, 0.3]])


def test_moving_average_hand_computed():
    # Ten values: half a window is 1. Ends average two values, the inside three.
    values = np.arange(10.0) ** 2
    np.testing.assert_allclose(moving_average(values)[[0, 1, 9]], [(0 + 1) / 2, (0 + 1 + 4) / 3, (64 + 81) / 2])
    np.testing.assert_allclose(moving_average(np.array([1.0, 100.0]), log=True), [10.0, 10.0])


def test_unreadable_runs_are_user_errors(tmp_path, trace_run):
    out = tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("what\n")
    for runs, message in [
        ([], "no run given"),
        ([tmp_path / "absent"], "not a run directory"),
        ([tmp_path / "empty"], "no metrics here"),
        ([trace_run, tmp_path / "early"], "no step is recorded yet"),
        ([tmp_path / "broken"], "metrics.jsonl:1: not a metrics line"),
    ]:
        with pytest.raises(UserError, match=message):
            report(runs, out)
    with pytest.raises(UserError, match="ends in .html"):
        report([trace_run], tmp_path / "report.pdf")
    assert not out.exists()


@pytest.mark.slow
def test_a_file_that_cannot_be_written_keeps_the_old_one(tmp_path, trace_run, monkeypatch):
    out = tmp_path / "report.html"
    out.write_bytes(b"old")

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match=r"report.\w+: cannot be written \(No space left on device\)"):
        report([trace_run], out)
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == ["report.html"]


def test_a_broken_config_is_named(tmp_path):
    with open_writers(tmp_path, []) as log:
        log.write(1, {"loss": 1.0})
    (tmp_path / "config.yaml").write_text("method: [")
    with pytest.raises(UserError, match="config.yaml: cannot be read"):
        load_runs([tmp_path])
