"""The quickstart's figures: one source for the table and the picture, true for every method, nothing for what did not happen."""

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from trace_jax.config import load
from trace_jax.quickstart import table
from trace_jax.report.quickstart import figure_subtitle, quickstart_figure
from trace_jax.report.run_summary import Summary, summarise
from trace_jax.report.series import Run

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "quickstart.yaml"
KL, UNGUIDED = "rollout_corr/k3_kl", "unguided/rollout_corr/k3_kl"
DIFFERENCE = "train_rollout_logprob_abs_diff"
RATE = "eval/validation/pass_at_1"


def evaluated(step: int, value: float, precision: str = "nvfp4") -> dict[str, Any]:
    low, high = {f"{RATE}_low": value - 0.1}, {f"{RATE}_high": value + 0.1}
    figures = {"step": step, RATE: value, "eval/validation/reward_mean": value + 0.2} | low | high
    return figures | {"eval/validation/precision": precision}


def training(steps: range) -> list[dict[str, Any]]:
    return [{"step": step, KL: step * 1e-4, DIFFERENCE: 0.01, "time/step": 0.5} for step in steps]


def guided_run() -> Run:
    """100 steps with an unguided figure every tenth; the values grow, so that another window has another median."""
    rows = [evaluated(0, 0.3), *training(range(1, 101))]
    for row in rows[10::10]:
        row |= {UNGUIDED: row["step"] * 1e-2, f"unguided/{DIFFERENCE}": 0.5}
    for step, value in ((10, 0.1), (90, 0.8)):
        rows[step] |= {f"guidance/audit/code_agreement/{site}/layer_1": value + extra for site, extra in (("k", 0.0), ("v", 0.1))}
    rows[100] |= evaluated(100, 0.5) | {
        "guidance/bytes_per_token": 24.0,
        "guidance/bytes_per_token/k": 12.0,
        "guidance/bytes_per_token/v": 12.0,
    }
    return Run("run", rows, load(CONFIG).model_dump(mode="json"))


def summary_of(rows: list[dict[str, Any]], *overrides: str) -> tuple[Run, Summary]:
    config = load(CONFIG, overrides)
    run = Run("run", rows, config.model_dump(mode="json"))
    return run, summarise(run, config)


def printed(summary: Summary) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as shown:
        console.print(table(summary, 1.0))
    return shown.get()


def test_guided_and_unguided_are_medians_of_the_same_steps() -> None:
    summary = summarise(guided_run(), load(CONFIG))
    # Steps 60, 70, 80, 90, 100 are those of the last 50 with an unguided figure; their median is step 80.
    assert summary.window == "median of 5 of the last 50 steps"
    assert [(gap.forward, round(gap.k3_kl, 9), gap.logprob_abs_diff) for gap in summary.gaps] == [
        ("guided forward", 0.008, 0.01),
        ("unguided forward", 0.8, 0.5),
    ]
    shown = printed(summary)
    assert "8.00e-03" in shown and "8.00e-01" in shown and summary.window in shown


def test_the_window_does_not_depend_on_how_often_unguided_is_measured() -> None:
    rows = training(range(1, 101))
    for row in rows[1::2]:
        row[UNGUIDED] = row["step"] * 1e-2
    _, summary = summary_of(rows)
    assert summary.window == "median of 25 of the last 50 steps" and summary.gaps[1].k3_kl == pytest.approx(0.76)


def test_without_unguided_figures_every_step_of_the_window_counts() -> None:
    _, summary = summary_of(training(range(1, 101)), "method=qat")
    assert [(gap.forward, gap.k3_kl) for gap in summary.gaps] == [("training forward, not guided", pytest.approx(0.00755))]
    assert summary.window == "median of the last 50 steps"
    _, short = summary_of([evaluated(0, 0.3), *training(range(1, 4))], "method=qat")
    assert short.window == "median of the last 3 steps"


def test_table_and_picture_show_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = guided_run()
    summary = summarise(run, load(CONFIG))
    labels, notes, lines = drawn(run, summary, tmp_path, monkeypatch)
    assert {"guided forward: 8.00e-03", "unguided forward: 8.00e-01"} <= labels
    assert any(summary.window in note for note in notes)
    # The newest audit, by site in the picture and as the mean over sites in the table.
    assert [0.8] in lines and [0.9] in lines
    assert summary.agreement_by_layer() == {1: pytest.approx(0.85)} and "layer 1: 0.850" in printed(summary)


def drawn(run: Run, summary: Summary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], list[str], list[list[float]]]:
    """Legend labels, texts and lines of the picture, as they are when it is encoded."""
    from trace_jax.report import quickstart

    labels, notes, lines = set(), [], []
    encode = quickstart.png_bytes

    def look(figure: Any) -> bytes:
        for axes in figure.axes:
            assert isinstance(axes, Axes)
            labels.update(axes.get_legend_handles_labels()[1])
            notes.extend((axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)))
            lines.extend([float(value) for value in line.get_ydata()] for line in axes.lines)  # pyright: ignore[reportGeneralTypeIssues,reportArgumentType]
        return encode(figure)

    monkeypatch.setattr(quickstart, "png_bytes", look)
    assert quickstart_figure(run, summary, folder / "q.png").read_bytes().startswith(b"\x89PNG")
    return labels, notes, lines


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("bf16", "rollout: bf16; trainer: no rounding"),
        ("naive", "rollout: nvfp4; trainer: no rounding"),
        ("qat", "rollout: nvfp4; trainer: rounding of its own"),
        ("trace", "rollout: nvfp4; trainer: guided rounding"),
    ],
)
def test_labels_are_those_of_the_method(method: str, expected: str) -> None:
    _, summary = summary_of([evaluated(0, 0.3, "bf16" if method == "bf16" else "nvfp4")], f"method={method}", "rollout.partial_sums=1")
    assert figure_subtitle(summary) == expected and "FP4" not in printed(summary)


def test_the_rollout_is_named_by_what_the_engine_executed() -> None:
    """The config asks for nvfp4 everywhere; the evaluation says what ran."""
    fallback = "weights nvfp4, activations bf16, k nvfp4, v nvfp4"
    _, summary = summary_of([evaluated(0, 0.3), evaluated(5, 0.4, fallback)], "rollout.partial_sums=1")
    assert summary.rollout == fallback
    _, summary = summary_of([{"step": 1, "loss": 0.0}], "rollout.partial_sums=1")
    assert summary.rollout == "unknown precision"


@pytest.mark.parametrize(
    ("rows", "absent", "panels"),
    [
        ([evaluated(0, 0.3), *training(range(1, 4)), evaluated(4, 0.4)], ("record", "equal values"), 2),
        ([evaluated(0, 0.3), *training(range(1, 4))], ("record", "step 3"), 2),  # eval.every is 0: before only
        (training(range(1, 4)), ("pass@1", "record"), 1),
        ([evaluated(0, 0.3)], ("KL", "record", "seconds per step"), 1),  # stopped before the first step
        ([{"step": 1, "loss": 1.0}], ("pass@1", "KL", "record"), 0),
    ],
)
def test_what_did_not_happen_is_left_out(
    rows: list[dict[str, Any]], absent: tuple[str, ...], panels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, summary = summary_of(rows, "method=bf16")
    shown = printed(summary)
    assert not [name for name in absent if name in shown] and "nan" not in shown and "None" not in shown
    _, notes, _ = drawn(run, summary, tmp_path, monkeypatch)
    titles = ("Held-out", "Gap between", "Size of", "Values that")
    assert not summary.gaps or any("not guided: 2.00e-04, median of the last" in note for note in notes)  # no legend has it
    assert any("before and after" in note for note in notes) is (len(summary.evaluations) > 1)
    assert sum(note.startswith(titles) for note in notes) == panels and "not recorded" not in notes
