"""What a reader relies on in every panel: units, legends beside the data, one colour a run, no invented values."""

import base64
import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from trace_jax.report.bars import stacked_bars
from trace_jax.report.build import _OVERVIEW, overview
from trace_jax.report.html import _figure
from trace_jax.report.sections import SECTIONS
from trace_jax.report.series import Run
from trace_jax.report.style import COLORS, legend_height, new_figure, styled

PANELS = {panel.title: panel for section in SECTIONS for panel in section.panels}
BARS = [title for title, panel in PANELS.items() if panel.bars]
KEYS = (
    *("reward/mean", "frac_reward_zero_std", "policy/entropy", "rollout_corr/k3_kl", "unguided/rollout_corr/k3_kl", "grad_norm", "loss"),
    *("train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max", "unguided/train_rollout_logprob_abs_diff"),
    *("rollout_corr/rollout_is_ratio_fraction_high", "router/agreement", "sync/staleness", "guidance/parity_agreement", "time/rollout"),
    *("guidance/saturation_fraction", "guidance/missing_fraction", "guidance/recomputed_fraction", "guidance/bytes_per_token/k"),
    *(
        f"guidance/audit/{what}/{site}/layer_{layer}"
        for what in ("code_agreement", "adjacent_share", "outside_bracket_fraction", "d_act")
        for site in ("k", "v")
        for layer in (0, 1)
    ),
    *("response/length_mean", "response/truncated_fraction", "policy/clip_fraction", "learning_rate"),
    *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s", "eval/validation/pass_at_1"),
)


def made_run(name, steps=4):
    return Run(name, [{"step": step} | {key: 0.1 + 0.01 * step for key in KEYS} for step in range(steps)])


def drawn(title, runs):
    with styled():
        axes = new_figure(5, 3).subplots()
        PANELS[title].draw(axes, runs)
    return axes


@pytest.mark.parametrize("title", PANELS)
def test_axes_are_labelled(title):
    axes = drawn(title, [made_run("run")])
    assert not axes.texts or title in BARS  # every panel has data here, so none says "not recorded"
    assert axes.get_xlabel() and (axes.get_ylabel() or title in BARS)


@pytest.mark.parametrize("title", [title for title in PANELS if title not in BARS])
def test_a_legend_lies_below_the_data_and_in_the_picture(title):
    axes = drawn(title, [made_run("first"), made_run("a run with a rather long name")])
    figure, legend = axes.get_figure(root=True), axes.get_legend()
    assert figure is not None and legend is not None
    figure.set_figheight(3 + legend_height(axes))
    with styled():
        figure.draw_without_rendering()
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.y1 < axes.get_xaxis().label.get_window_extent().y0
    assert box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0


@pytest.mark.parametrize("title", [title for title in PANELS if title not in BARS])
def test_a_run_has_one_colour_in_every_panel(title):
    axes = drawn(title, [made_run("first"), made_run("second")])
    colours = {"first": set(), "second": set()}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line: Any = handle[0] if isinstance(handle, tuple) else handle
        colours[label.split(" · ")[0]].add(to_hex(line.get_color()))
    assert colours == {"first": {COLORS[0]}, "second": {COLORS[1]}}


def picture_size(figure):
    data = base64.b64decode(re.findall('base64,([^"]+)', figure)[0])
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_panel_is_drawn_by_its_fields_whatever_its_title(monkeypatch):
    runs = [made_run("first"), made_run("second")]
    assert BARS == ["Size of the record", "Time per step"]
    with styled():
        for title in (*BARS, "Policy entropy"):
            renamed = dataclasses.replace(PANELS[title], title="Renamed")
            assert picture_size(_figure(renamed, runs)) == picture_size(_figure(PANELS[title], runs))
        assert [panel.bars for panel in _OVERVIEW] == [False] * 4 + [True] * 2
        monkeypatch.setattr("trace_jax.report.build._OVERVIEW", [dataclasses.replace(panel, title="Renamed") for panel in _OVERVIEW])
        assert overview(runs).startswith(b"\x89PNG")


def test_a_distance_of_zero_has_no_point_on_a_log_axis():
    key = "guidance/audit/d_act/k/layer_"
    (line,) = drawn("Activation distance", [Run("run", [{"step": 1, key + "0": 0.0, key + "1": 0.5}])]).lines
    np.testing.assert_array_equal(line.get_ydata(), [math.nan, 0.5])


def test_a_schedule_is_not_smoothed():
    rates = np.minimum(np.arange(60) / 10, 1.0)
    rows = [{"step": step, "learning_rate": float(rate)} for step, rate in enumerate(rates)]
    (line,) = drawn("Learning rate", [Run("run", rows)]).lines
    np.testing.assert_array_equal(line.get_ydata(), rates)


def test_zeros_are_named_and_the_axis_has_no_negative_shares():
    rows = [{"step": step, "guidance/missing_fraction": 0.0, "guidance/saturation_fraction": 0.0} for step in range(3)]
    axes = drawn("Saturated, missing, recomputed", [Run("run", rows)])
    assert axes.get_legend_handles_labels()[1] == ["values saturated: always 0", "tokens without a record: always 0"]
    assert axes.get_ylim()[0] > -0.05


def test_slivers_count_but_are_not_drawn():
    with styled():
        axes = new_figure(5, 3).subplots()
        stacked_bars(axes, ["run"], [{"train": 1.0, "reward": 0.001}], unit="s", total_format="{:.3f}")
    assert axes.get_legend_handles_labels()[1] == ["train"]
    assert [text.get_text() for text in axes.texts] == ["1.001 s"]


@pytest.mark.parametrize(("what", "name"), [("pass_at_1", "pass rate"), ("reward_mean", "reward")])
def test_evaluations_are_points_as_the_axis_says(what: str, name: str):
    rows = [{"step": step, "reward/mean": 0.4, f"eval/test/{what}": 0.1 + 0.1 * step} for step in range(3)]
    axes = drawn("Reward at rollout precision", [Run("run", rows)])
    assert axes.get_ylabel() == f"reward (line), {name} (points)"
    (points,) = axes.containers
    assert isinstance(points, ErrorbarContainer) and points.lines[0].get_linestyle() == "None"
