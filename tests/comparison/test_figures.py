"""`comparison.json`, table and page from run folders made by hand, for what short real runs do not show."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.comparison.made_runs import PROMPTS, comparison_of, evaluation, write_run
from trace_jax.comparison.figures import BF16_EVALUATION, DIVERGED, SCHEMA_VERSION, comparison_figures
from trace_jax.comparison.page import write_page
from trace_jax.comparison.table import cells, rows
from trace_jax.evaluation.pass_rate import wilson

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"


def step(kl: float, unguided: float | None = None, agreement: dict[int, float] | None = None) -> dict[str, Any]:
    row = {"rollout_corr/k3_kl": kl, "train_rollout_logprob_abs_diff": 10 * kl, "train_rollout_logprob_abs_diff_max": 50 * kl}
    row |= {"time/rollout": 1.0, "time/train": 2.0, "time/sync": 0.5, "time/step": 4.0, "grad_norm": 1.0}
    if unguided is not None:
        row |= {
            f"unguided/{name}": value * unguided / kl for name, value in row.items() if name.startswith(("rollout_corr", "train_rollout"))
        }
        row |= {"guidance/bytes_per_token": 20.0, "guidance/bytes_per_token/k": 8.0, "guidance/bytes_per_token/v": 12.0}
    for layer, share in (agreement or {}).items():
        row |= {f"guidance/audit/code_agreement/{site}/layer_{layer}": share - 0.1 * (site == "v") for site in ("k", "v")}
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of bf16, naive and trace with four steps; naive diverges with the second seed, and falls with the first."""
    out = tmp_path_factory.mktemp("made")
    runs = out / "runs"
    for seed in (0, 1):
        shift = 0.1 * seed
        start = {0: evaluation(0.2 + shift)}
        write_run(
            runs / f"bf16-seed-{seed}", {0: evaluation(0.3, "bf16"), 1: step(1e-5), 4: step(1e-5) | evaluation(0.6 + shift, "bf16")}, "bf16"
        )
        write_run(
            runs / f"trace-seed-{seed}",
            start | {1: step(1e-4, 1e-2), 2: step(3e-4, 4e-2, {0: 0.9, 1: 1.0}), 4: step(2e-4, 2e-2) | evaluation(0.5 + shift)},
        )
        (runs / f"trace-seed-{seed}" / BF16_EVALUATION).write_text(json.dumps(bf16_file(0.4)))
    falling = {0: evaluation(0.6), 2: step(0.1) | evaluation(0.7), 4: step(0.3) | evaluation(0.05)}
    write_run(runs / "naive-seed-0", falling, "naive")
    (runs / "naive-seed-0" / BF16_EVALUATION).write_text(json.dumps(bf16_file(0.1)))
    write_run(runs / "naive-seed-1", {0: evaluation(0.3), 1: step(0.2)}, "naive")
    (runs / "naive-seed-1" / BF16_EVALUATION).write_text(json.dumps(bf16_file(0.3)))
    (runs / "naive-seed-1" / DIVERGED).write_text(json.dumps({"step": 2}))
    return out


def bf16_file(rate: float) -> dict[str, Any]:
    low, high = wilson(rate, PROMPTS)
    return {"pass_at_1": rate, "low": low, "high": high, "reward_mean": rate, "prompts": PROMPTS, "precision": "bf16"}


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    return comparison_figures(comparison_of("bf16", "naive", "trace", seeds=2), folder / "runs")


def test_rates_are_pooled_over_seeds(figures: dict[str, Any]) -> None:
    trace = figures["methods"]["trace"]
    low, high = wilson(0.55, 2 * PROMPTS)
    assert trace["after"] == pytest.approx({"pass_at_1": 0.55, "low": low, "high": high, "reward_mean": 0.65, "seeds": 2})
    assert [run["after"]["pass_at_1"] for run in trace["runs"]] == pytest.approx([0.5, 0.6])
    assert trace["before"]["pass_at_1"] == pytest.approx(0.25) and trace["after_bf16"]["pass_at_1"] == pytest.approx(0.4)


def test_a_bf16_rollout_is_its_own_bf16_evaluation(figures: dict[str, Any]) -> None:
    bf16 = figures["methods"]["bf16"]
    assert bf16["after_bf16"] == bf16["after"] and bf16["after"]["pass_at_1"] == pytest.approx(0.65)


def test_every_gap_is_named_for_its_forward(figures: dict[str, Any]) -> None:
    """Medians over steps 1, 2 and 4 of trace; a method without guidance has no guided figure."""
    trace, bf16 = figures["methods"]["trace"]["gaps"], figures["methods"]["bf16"]["gaps"]
    assert (
        trace["guided"]
        == trace["training"]
        == pytest.approx({"k3_kl": 2e-4, "logprob_abs_diff": 2e-3, "logprob_abs_diff_max": 1e-2, "seeds": 2})
    )
    assert trace["unguided"] == pytest.approx({"k3_kl": 2e-2, "logprob_abs_diff": 0.2, "logprob_abs_diff_max": 1.0, "seeds": 2})
    assert bf16["guided"] is None and bf16["unguided"] == bf16["training"] == pytest.approx(
        {"k3_kl": 1e-5, "logprob_abs_diff": 1e-4, "logprob_abs_diff_max": 5e-4, "seeds": 2}
    )


def test_agreement_by_depth_bytes_and_time(figures: dict[str, Any]) -> None:
    trace = figures["methods"]["trace"]
    assert trace["code_agreement"] == pytest.approx({"0": 0.85, "1": 0.95})
    assert trace["code_agreement_by_site"]["v"] == pytest.approx({"0": 0.8, "1": 0.9})
    assert trace["bytes_per_token"] == {"k": 8.0, "v": 12.0} and figures["methods"]["bf16"]["bytes_per_token"] == {}
    assert trace["seconds_per_step"] == {"rollout": 1.0, "train": 2.0, "sync": 0.5, "step": 4.0}


def test_collapses(figures: dict[str, Any]) -> None:
    naive = figures["methods"]["naive"]
    assert naive["collapses"] == [{"seed": 0, "step": 4, "reason": "reward"}, {"seed": 1, "step": 2, "reason": "diverged"}]
    assert figures["methods"]["trace"]["collapses"] == [] and naive["runs"][1]["after"] is None
    # The seed that never got to another evaluation is not part of the rate, and the table says so.
    assert naive["after"]["pass_at_1"] == pytest.approx(0.05) and naive["after"]["seeds"] == 1
    assert cells(naive)["pass@1 [95 %]"].startswith("0.050 [") and cells(naive)["pass@1 [95 %]"].endswith("] (1 of 2)")


def test_the_table_shows_the_figures(figures: dict[str, Any]) -> None:
    shown = list(rows(figures))
    assert [name for name, _ in shown] == [line for name in ("bf16", "naive", "trace") for line in (name, "  seed 0", "  seed 1")]
    low, high = wilson(0.55, 2 * PROMPTS)
    assert list(shown[6][1].values()) == [
        f"0.550 [{low:.3f}, {high:.3f}]",
        *("0.400", "2.0e-04", "2.0e-02", "1.000", "85 95", "-", "20", "1/2/0.5"),
    ]
    assert shown[3][1]["collapse"] == "2 of 2: 4 (reward), 2 (diverged)" and shown[5][1]["collapse"] == "2 (diverged)"
    assert cells(figures["methods"]["bf16"])["KL\nguided"] == "-" and shown[5][1]["pass@1 [95 %]"] == "-"


def test_every_key_is_documented_and_every_documented_one_is_there(figures: dict[str, Any]) -> None:
    text = DOCUMENTATION.read_text().split("## comparison.json")[1].split("## Collapse")[0]
    documented = set(re.findall(r"`(\w+)`", text))
    entry, run = figures["methods"]["naive"], figures["methods"]["naive"]["runs"][0]
    nested = (
        figures,
        entry,
        run,
        entry["collapses"][0],
        entry["before"],
        entry["gaps"],
        entry["gaps"]["training"],
        run["seconds_per_step"],
    )
    keys = {key for mapping in nested for key in mapping}
    assert keys <= documented, keys - documented
    assert documented - keys <= {"null"} and f"`schema_version` is {SCHEMA_VERSION}" in text


def test_the_page_is_one_file_with_every_method(
    figures: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_jax.comparison.page.SECTIONS", ())  # its other panels are those of `report`, and take seconds
    (tmp_path / "runs").symlink_to(folder / "runs")
    write_page(figures, tmp_path)
    text = (tmp_path / "comparison.html").read_text()
    assert not re.search(r"https?://|<script|@import|url\(", text)
    for name in ("bf16", "naive", "trace"):
        assert f"</span>{name}</th>" in text
    for shown in ("Held-out pass rate after training", "KL of rollout and trainer at the end", "2 of 2: 4 (reward), 2 (diverged)"):
        assert shown in text
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == 2 and all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("comparison.png", "methods.png"))
