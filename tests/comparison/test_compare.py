"""A real comparison of tiny runs: what it shares, what it reports, and that no interruption changes it."""

from __future__ import annotations

import collections
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import yaml

from tests.train.conftest import VALUES
from trace_jax.cli.app import main
from trace_jax.comparison import page as comparison_page
from trace_jax.comparison import run as comparison_run
from trace_jax.comparison import start as comparison_start
from trace_jax.comparison.plan import plan_comparison
from trace_jax.comparison.run import run_comparison
from trace_jax.config import Config
from trace_jax.evaluation.pass_rate import wilson
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train import run as train_run
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.skipped import Diverged

SETTINGS = (
    *("steps=2", "sft.steps=10", "sft.eval_every=0", "eval.every=2", "rollout.max_new_tokens=3"),  # so short that all rows have one length
    *("guidance.audit.every=1", "guidance.audit.sequences=1", "train.unguided_every=1"),
)
METHODS = ("naive", "trace")


class Finished(NamedTuple):
    """A finished comparison, its figures, and how often its dear parts ran."""

    out: Path
    figures: dict[str, Any]
    calls: dict[str, int]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    return path


@pytest.fixture(scope="module")
def finished(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """naive and trace with two seeds, through the command; a cold start, four runs of two steps."""
    out = tmp_path_factory.mktemp("finished") / "out"
    calls: dict[str, int] = collections.Counter()

    def counted(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        original = getattr(module, name)

        def count(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **named)

        patch.setattr(module, name, count)

    with pytest.MonkeyPatch.context() as patch:
        counted(patch, comparison_start, "run_sft")
        counted(patch, train_run, "evaluate")
        counted(patch, comparison_run, "load_config_task")
        counted(patch, comparison_run, "pass_rate_at")
        patch.setattr(comparison_page, "SECTIONS", ())  # its other panels are those of `report`, and take seconds
        words = ["--methods", ",".join(METHODS), "--seeds", "2", "--out", str(out)]
        assert main(["compare", str(config_file), *SETTINGS, *words, "--json"]) == 0
    return Finished(out, json.loads((out / "comparison.json").read_text()), calls)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(run: Path) -> str:
    rows = read_metrics(run)
    return json.dumps([{name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))} for row in rows])


def assert_same_run(run: Path, other: Path) -> None:
    """Equal metrics, answers, weights and BF16 evaluation."""
    assert untimed(run) == untimed(other)
    for name in ("rollouts/step_000001.jsonl", "rollouts/step_000002.jsonl", "bf16_evaluation.json"):
        assert (run / name).read_bytes() == (other / name).read_bytes()
    jax.tree.map(np.testing.assert_array_equal, load_policy(run).params, load_policy(other).params)


def test_the_folder(finished: Finished) -> None:
    names = {path.name for path in finished.out.iterdir()}
    assert names == {
        *(".lock", "comparison.yaml", "cold-start", "runs"),
        *("comparison.json", "comparison.html", "comparison.png", "methods.png"),
    }
    assert {path.name for path in (finished.out / "runs").iterdir()} == {f"{method}-seed-{seed}" for method in METHODS for seed in (0, 1)}


def test_one_cold_start_for_all_methods_and_seeds(finished: Finished) -> None:
    assert finished.calls["run_sft"] == 1
    start = load_policy(finished.out / "cold-start")
    for run in (finished.out / "runs").iterdir():
        first = load_policy(run / "checkpoints" / "0")
        jax.tree.map(np.testing.assert_array_equal, (first.params, first.multipliers), (start.params, start.multipliers))
        assert yaml.safe_load((run / "config.yaml").read_text())["model"]["source"] == str(finished.out / "cold-start")


def test_runs_of_a_seed_share_the_task_and_the_first_evaluation(finished: Finished) -> None:
    # The check before the start, then once a seed. Of each seed one evaluation before training, and one of each method after it.
    assert finished.calls["load_config_task"] == 1 + 2
    assert finished.calls["evaluate"] == 2 * (1 + len(METHODS)) and finished.calls["pass_rate_at"] == 4
    first = {run.name: rows_of(run)[0]["eval/validation/pass_at_1"] for run in (finished.out / "runs").iterdir()}
    assert all(first[f"naive-seed-{seed}"] == first[f"trace-seed-{seed}"] for seed in (0, 1))


@pytest.mark.slow
def test_a_run_is_what_train_makes_of_its_config(finished: Finished, tmp_path: Path) -> None:
    """The shared parts change nothing: the same run alone, from the config that it left."""
    run = finished.out / "runs" / "trace-seed-1"
    assert main(["train", str(run / "config.yaml"), "--out", str(tmp_path / "alone")]) == 0
    assert untimed(tmp_path / "alone") == untimed(run)
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path / "alone").params, load_policy(run).params)


@pytest.mark.parametrize("method", METHODS)
def test_every_figure_is_that_of_the_metrics(finished: Finished, method: str) -> None:
    """Recomputed from the lines of metrics.jsonl, without the code that made the figures."""
    entry = finished.figures["methods"][method]
    runs = [rows_of(finished.out / run["run"]) for run in entry["runs"]]
    last = [rows[-1] for rows in runs]
    rate = statistics.fmean(row["eval/validation/pass_at_1"] for row in last)
    low, high = wilson(rate, 2 * 4)  # four prompts, one answer each, two seeds
    assert entry["after"]["pass_at_1"] == pytest.approx(rate) and (entry["after"]["low"], entry["after"]["high"]) == pytest.approx(
        (low, high)
    )
    assert entry["after"]["reward_mean"] == pytest.approx(statistics.fmean(row["eval/validation/reward_mean"] for row in last))

    def median_of_medians(name: str) -> float:
        return statistics.median(statistics.median(row[name] for row in rows[1:]) for rows in runs)

    forwards = {"unguided": "unguided/", "guided": ""} if method == "trace" else {"unguided": ""}
    names = {"k3_kl": "rollout_corr/k3_kl", "logprob_abs_diff_max": "train_rollout_logprob_abs_diff_max"}
    for forward, prefix in forwards.items():
        for figure, name in names.items():
            assert entry["gaps"][forward][figure] == pytest.approx(median_of_medians(prefix + name))
    assert (entry["gaps"]["guided"] is None) == (method == "naive")
    for part in ("rollout", "train", "sync", "step"):
        assert entry["seconds_per_step"][part] == pytest.approx(median_of_medians(f"time/{part}"))
    sizes = [row.get("guidance/bytes_per_token", 0.0) for row in last]  # a part depends on the number of tokens
    assert sum(entry["bytes_per_token"].values()) == pytest.approx(statistics.median(sizes))
    for layer in (0, 1):
        shares = [
            statistics.fmean(row[f"guidance/audit/code_agreement/{site}/layer_{layer}"] for site in ("expert_input", "k", "v"))
            for row in last
        ]
        assert entry["code_agreement"][str(layer)] == pytest.approx(statistics.median(shares))
    for run in entry["runs"]:
        assert json.loads((finished.out / run["run"] / "bf16_evaluation.json").read_text())["pass_at_1"] == run["after_bf16"]["pass_at_1"]


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page takes seconds to draw; that of `finished` is enough."""
    monkeypatch.setattr(comparison_run, "write_page", lambda figures, out: None)


def interrupted(config_file: Path, out: Path, stop: Any, resume: bool) -> Any:
    """A call with one seed whose progress is watched by `stop`."""
    plan = plan_comparison(config_file, [*SETTINGS, "checkpoint.every=1"], names=METHODS)
    return run_comparison(plan, out, resume=resume, progress=stop)


class Killed(BaseException):
    """Ends the program in place of a kill: nothing is saved after it."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_killed_and_stopped_and_resumed_it_is_the_same(
    finished: Finished, config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, former = tmp_path / "out", signal.getsignal(signal.SIGTERM)

    def die_in_the_cold_start(what: str, done: int, total: int) -> None:
        if done == 7:
            raise Killed

    def die_in_the_first_run(what: str, done: int, total: int) -> None:
        if what.startswith("naive") and done == 2:
            raise Killed

    def stop_in_the_second_run(what: str, done: int, total: int) -> None:
        if what.startswith("trace") and done == 2 + 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Killed):
        interrupted(config_file, out, die_in_the_cold_start, resume=False)
    assert not (out / "cold-start").exists()
    with pytest.raises(Killed):
        interrupted(config_file, out, die_in_the_first_run, resume=True)
    start = (out / "cold-start" / "metrics.jsonl").stat().st_mtime_ns
    assert interrupted(config_file, out, stop_in_the_second_run, resume=True) is None
    assert "comparison stopped, 1 of 2 runs are finished; go on with --resume" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == former and not (out / "comparison.json").exists()
    first = {path: path.stat().st_mtime_ns for path in (out / "runs" / "naive-seed-0").rglob("*") if path.name != ".lock"}

    figures = interrupted(config_file, out, lambda *_: None, resume=True)
    assert "resumed after step 1" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in first} == first and (out / "cold-start" / "metrics.jsonl").stat().st_mtime_ns == start
    for method in METHODS:
        assert_same_run(out / "runs" / f"{method}-seed-0", finished.out / "runs" / f"{method}-seed-0")
    ours, theirs = figures["methods"]["trace"]["runs"][0], finished.figures["methods"]["trace"]["runs"][0]
    different = {key for key in ours if ours[key] != theirs[key]}
    assert different == {"seconds_per_step"}
    # Once more: nothing is left to do.
    assert interrupted(config_file, out, pytest.fail, resume=True) == json.loads((out / "comparison.json").read_text())


@pytest.mark.usefixtures("no_page")
def test_a_run_that_diverges_does_not_end_the_others(
    finished: Finished, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy of the finished comparison without its naive runs; these then give up in step 2."""
    out = shutil.copytree(finished.out, tmp_path / "out")
    for seed in (0, 1):
        shutil.rmtree(out / "runs" / f"naive-seed-{seed}" / "checkpoints" / "2")
        (out / "runs" / f"naive-seed-{seed}" / "bf16_evaluation.json").unlink()

    def gives_up(config: Config, folder: Path, **_: Any) -> None:
        assert config.method == "naive"
        raise Diverged(2, "do something")

    monkeypatch.setattr(comparison_run, "run_training", gives_up)
    plan = plan_comparison(config_file, SETTINGS, names=METHODS, seeds=2)
    figures = run_comparison(plan, out, resume=True)
    assert figures is not None and figures["methods"]["naive"]["collapses"] == [
        {"seed": seed, "step": 2, "reason": "diverged"} for seed in (0, 1)
    ]
    assert figures["methods"]["trace"]["after"] == finished.figures["methods"]["trace"]["after"]
    assert "naive-seed-0: step 2: 3 gradients in a row were not finite" in capfd.readouterr().err
    monkeypatch.setattr(comparison_run, "run_training", pytest.fail)
    assert run_comparison(plan, out, resume=True) == figures  # it is not tried again


def test_a_source_without_multipliers_is_calibrated_once(
    finished: Finished, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trace_jax.models.hf import save_hf_directory

    loaded = load_policy(finished.out / "cold-start")
    save_hf_directory(tmp_path / "hf", loaded.policy.family, loaded.policy.config, loaded.params)
    monkeypatch.setattr(comparison_run._Work, "all_runs", lambda self: False)
    plan = plan_comparison(config_file, [*SETTINGS, f"model.source={tmp_path / 'hf'}"], names=METHODS)
    assert run_comparison(plan, tmp_path / "out") is None
    made = load_policy(tmp_path / "out" / "cold-start")
    assert sorted(made.multipliers) == ["down_input", "expert_input", "k", "v"]
    assert all(math.isfinite(float(leaf.sum())) for leaf in jax.tree.leaves(made.multipliers))


def test_a_source_is_taken_as_it_is_at_the_beginning(
    finished: Finished, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may go on: later calls start from the step of the first one."""
    monkeypatch.setattr(comparison_run._Work, "all_runs", lambda self: False)
    source = shutil.copytree(finished.out / "cold-start", tmp_path / "source")
    plan = plan_comparison(config_file, [*SETTINGS, f"model.source={source}"], names=METHODS)
    assert run_comparison(plan, tmp_path / "out") is None
    stored = yaml.safe_load((tmp_path / "out" / "comparison.yaml").read_text())["start"]
    assert stored == str(source / "checkpoints" / "10") and not (tmp_path / "out" / "cold-start").exists()
    shutil.copytree(source / "checkpoints" / "10", source / "checkpoints" / "11")
    assert run_comparison(plan, tmp_path / "out", resume=True) is None
    assert yaml.safe_load((tmp_path / "out" / "comparison.yaml").read_text())["start"] == stored


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_a_real_signal(finished: Finished, config_file: Path, tmp_path: Path, environment: dict[str, str], number: int, code: int) -> None:
    """To the program, as soon as its first run has begun; SIGTERM ends it as it ends `train`."""
    words = ["compare", str(config_file), *SETTINGS, "--methods", ",".join(METHODS), "--out", str(tmp_path / "out")]
    program = subprocess.Popen([sys.executable, "-m", "trace_jax", *words], env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "runs" / "naive-seed-0" / "config.yaml").exists():
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(number)
    errors = program.communicate(timeout=240)[1]
    assert program.returncode == code and ("0 of 2 runs are finished" in errors) == (code == 0)
    assert main([*words, "--resume"]) == 0
    for method in METHODS:
        assert_same_run(tmp_path / "out" / "runs" / f"{method}-seed-0", finished.out / "runs" / f"{method}-seed-0")
