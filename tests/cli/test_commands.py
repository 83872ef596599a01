"""The commands on one tiny policy, from cold start to report, through the program's own entry point, then as other programs use it.

One file, so that one worker trains the policy once.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.cli.conftest import Program
from tests.selection import slow_but
from trace_jax.cli.app import main
from trace_jax.errors import UserError
from trace_jax.evaluation.pass_rate import PassRate
from trace_jax.evaluation.rollout import generate_rollouts
from trace_jax.evaluation.run import evaluate_policy
from trace_jax.models.hf import save_hf_directory
from trace_jax.train.checkpoint import load_policy


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Runs a command with --json; stdout must be exactly one JSON object."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_leaves_what_the_design_promises(folder: Path) -> None:
    run = folder / "run"
    assert {"config.yaml", "metrics.jsonl", "rollouts", "checkpoints"} <= {entry.name for entry in run.iterdir()}
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    names = {
        *(
            "reward/mean",
            "reward/pass_rate",
            "response/length_mean",
            "response/truncated_fraction",
            "rollout_corr/kl",
            "rollout_corr/k3_kl",
        ),
        *("rollout_corr/log_ppl_abs_diff", "rollout_corr/chi2_token", "rollout_corr/rollout_is_mean", "frac_reward_zero_std", "loss"),
        *("rollout_corr/rollout_is_ratio_fraction_high", "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"),
        *("token_mult_prob_error", "unguided/rollout_corr/k3_kl", "guidance/parity_agreement", "guidance/missing_fraction"),
        *("guidance/recomputed_fraction", "guidance/saturation_fraction", "guidance/bytes_per_token", "router/agreement"),
        *("policy/entropy", "policy/clip_fraction", "grad_norm", "learning_rate", "sync/version", "sync/staleness"),
        *("time/rollout", "time/reward", "time/train", "time/sync", "time/step"),
        *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"),
        *(f"guidance/audit/{what}/k/layer_1" for what in ("code_agreement", "outside_bracket_fraction", "d_act")),
    }
    assert names <= rows[1].keys(), names - rows[1].keys()
    assert rows[2]["guidance/missing_fraction"] == 0
    assert rows[2]["eval/validation/pass_at_1_low"] <= rows[2]["eval/validation/pass_at_1"] <= rows[2]["eval/validation/pass_at_1_high"]


@pytest.mark.parametrize("precision", slow_but(["nvfp4"], ["bf16", "fp8", "nvfp4", "mxfp4"]))
def test_eval_at_every_precision(folder: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    result = run_json(capsys, "eval", folder / "run", "--precision", precision, "--samples", "2")
    assert (result["precision"], result["prompts"], result["samples"], result["verifier_errors"]) == (precision, 4, 2, 0)
    assert 0 <= result["low"] <= result["pass_at_1"] <= result["high"] <= 1


@pytest.mark.slow
def test_eval_repeats_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_json(capsys, "eval", folder / "run") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("arguments", [["--greedy"], ["eval.greedy=true"], ["rollout.temperature=0"]])
def test_eval_says_when_it_was_greedy(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    result = run_json(capsys, "eval", folder / "run", *arguments, "--max-prompts", "2")
    assert (result["greedy"], result["temperature"]) == (True, 0.0)


def test_eval_returns_what_it_promises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "eval", folder / "run", "--max-prompts", "2")
    assert (result["greedy"], result["temperature"], result["precision"]) == (False, 1.0, "nvfp4")
    promised = {"policy", "task", "split", "greedy", "temperature", "seed"}
    assert result.keys() == promised | {field.name for field in fields(PassRate)}
    assert all(f"`{name}`" in (evaluate_policy.__doc__ or "") for name in promised)


@pytest.mark.slow
def test_mismatch_orders_the_methods_by_what_they_know(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "mismatch", folder / "run", "--precisions", "bf16,nvfp4", "--max-prompts", "8")
    methods = report["precisions"]["nvfp4"]["methods"]
    gap = {name: result["metrics"]["train_rollout_logprob_abs_diff"] for name, result in methods.items()}
    # In FP32 both paths compute nearly the same, so emulating the rollout's rounding removes almost the whole gap.
    assert gap["trace_full"] < 1e-4 < gap["naive"] and gap["qat"] < gap["naive"] / 10
    assert report["precisions"]["bf16"]["methods"]["bf16"]["metrics"]["train_rollout_logprob_abs_diff"] < 1e-4
    assert methods["trace_full"]["sites"]["expert_input"]["1"]["code_agreement"] == 1.0
    assert methods["naive"]["sites"]["expert_input"]["1"]["code_agreement"] < 0.5
    assert len(methods["qat"]["positions"]) <= 6 and methods["trace_full"]["gap"] == "small"
    # A policy of a few training steps solves nothing, so nothing can be said about a loss, whatever the gap.
    assert report["precisions"]["nvfp4"]["verdict"] == "unknown" and "verdict" not in report["precisions"]["bf16"]
    assert "is too uncertain to show a loss" in report["precisions"]["nvfp4"]["answer"]


VARIANTS = """
unrounded: {method: naive}
own: {method: qat}
last: {method: trace, guidance: {layers: "last:1"}}
all: {method: trace_full}
wide_cache: {method: trace_full, train_quant: {kv_cache: none}, rollout: {kv_cache: {k: bf16, v: bf16}}}
half: {method: quads}
"""


@pytest.mark.slow
def test_mismatch_measures_the_variants_of_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "variants.yaml").write_text(VARIANTS)
    report = run_json(capsys, "mismatch", folder / "run", "--variants", tmp_path / "variants.yaml", "--max-prompts", "8")
    found = report["variants"]
    gap = {name: entry["metrics"]["train_rollout_logprob_abs_diff"] for name, entry in found.items()}
    assert gap["all"] < 1e-4 < gap["unrounded"] and gap["all"] <= gap["last"] <= gap["own"] < gap["unrounded"] / 10
    # What has the same rollout was measured on the same answers; what has not names its own.
    assert [found[name]["reward_mean"] for name in ("own", "last", "all")] == [found["unrounded"]["reward_mean"]] * 3
    assert found["all"]["rollout"] == "nvfp4" and "k bf16" in found["wide_cache"]["rollout"]
    assert set(found["all"]["sites"]) == {"expert_input", "k", "v"} and set(found["wide_cache"]["sites"]) == {"expert_input"}
    assert found["last"]["sites"]["k"]["1"]["code_agreement"] == found["all"]["sites"]["k"]["1"]["code_agreement"] == 1.0
    assert found["half"]["metrics"]["train_rollout_logprob_abs_diff"] > 0


@pytest.mark.slow  # tests/evaluation/test_saved_cache.py has the functions behind it
def test_rollout_saves_a_cache_that_mismatch_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cache = folder / "answers.jsonl", folder / "cache"
    result = run_json(capsys, "rollout", folder / "run", "--out", out, "--save-cache", cache, "--max-prompts", "3")
    assert result["sequences"] == 12 == len(out.read_text().splitlines()) and result["precision"] == "nvfp4"
    report = run_json(capsys, "mismatch", folder / "run", "--cache", cache, "--methods", "qat,trace_full")
    assert (report["precisions"]["nvfp4"]["sequences"], report["precisions"]["nvfp4"]["prompts"]) == (12, 3)
    assert set(report["precisions"]["nvfp4"]["methods"]) == {"qat", "trace_full"}
    assert "cannot be judged, bf16 was not measured" in report["precisions"]["nvfp4"]["answer"]
    assert main(["rollout", str(folder / "run"), "--out", str(out)]) == 2
    assert f"{out} exists" in capsys.readouterr().err


def test_a_cache_of_a_method_without_a_record_is_refused_before_generating(folder: Path, tmp_path: Path) -> None:
    announced: list[str] = []

    def announce(what: str, done: int = 0, total: int | None = None) -> None:
        announced.append(what)

    with pytest.raises(UserError, match="method naive records no guidance to save; add method=trace"):
        generate_rollouts(
            folder / "config.yaml",
            ["method=naive"],
            out=tmp_path / "answers.jsonl",
            save_cache=tmp_path / "cache",
            announce=announce,
        )
    assert announced == [f"reading {folder / 'config.yaml'}"] and list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_leaves_the_answers_and_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cache = tmp_path / "answers.jsonl", tmp_path / "cache"
    replace = os.replace

    def full(source: str | Path, target: str | Path) -> None:
        if Path(target).parent == cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        generate_rollouts(folder / "run", out=out, save_cache=cache, max_prompts=1)
    assert len(out.read_text().splitlines()) == 4 and not cache.exists()


@pytest.mark.slow
def test_report_of_two_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "report", folder / "run", folder / "sft", "--out", folder / "report.html")
    assert Path(result["html"]).read_text().lstrip().lower().startswith("<!doctype html") and Path(result["png"]).stat().st_size > 10_000


def test_import_of_an_export_is_the_same_policy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_policy(folder / "run")
    save_hf_directory(folder / "hf", loaded.policy.family, loaded.policy.config, loaded.params)
    result = run_json(capsys, "import", folder / "hf", folder / "imported")
    again = load_policy(folder / "imported")
    assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(again.params), strict=True):
        assert np.array_equal(np.asarray(ours.astype("bfloat16"), np.float32), np.asarray(theirs, np.float32))
    assert main(["import", str(folder / "hf"), str(folder / "imported")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_dry_run_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    assert main(["train", str(folder / "config.yaml"), "--dry-run"]) == 0
    assert "guidance record per token" in capsys.readouterr().out and sorted(folder.iterdir()) == before


def test_dry_run_refuses_before_it_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["train", str(folder / "config.yaml"), "--dry-run", "guidance.layers=[9]"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "guidance.layers is [9], but the model has 2 layers" in shown.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["eval", "{run}", "--precision", "int4"], "precision 'int4' is unknown"),
        (["mismatch", "{run}", "--methods", "magic"], "--methods 'magic' is unknown"),
        (["mismatch", "{run}", "--engine", "other"], "rollout.engine is 'other'"),
        (["mismatch", "{run}", "--cache", "{run}/none"], "no such folder"),
        (["mismatch", "{run}", "--cache", "{run}", "--split", "test"], "--cache brings its own answers"),
        (["mismatch", "{run}", "--variants", "{run}/config.yaml", "--methods", "qat"], "--variants says itself how to round"),
        (["mismatch", "{run}", "--variants", "{run}/none.yaml"], "none.yaml: cannot be read"),
        (["mismatch", "{run}", "--precisions", "fp8", "--methods", "trace"], "none of them makes sense at precision fp8"),
        (["rollout", "{run}", "--out", "{run}/config.yaml/none.jsonl"], "config.yaml is not a folder that you may write to"),
        (["rollout", "{run}", "--out", "{run}/none", "--save-cache", "{run}/config.yaml"], "config.yaml is not an empty folder"),
        (["rollout", "{run}", "--out", "{run}/none", "--save-cache", "{run}/config.yaml/none"], "config.yaml is not a folder"),
        (["rollout", "{run}", "--out", "{run}/none/answers.jsonl", "--save-cache", "{run}/none"], "lie in each other"),
        (["rollout", "{run}", "--out", "{run}/none", "--save-cache", "{run}/none/cache"], "lie in each other"),
        (["eval", "{run}", "--greedy", "--samples", "2"], "2 greedy answers to one prompt are all the same"),
        (["train", "{run}/../config.yaml", "--out", "{run}/config.yaml/none"], "config.yaml is not a folder that you may write to"),
        (["sft", "{run}/../config.yaml", "--out", "{run}/config.yaml"], "config.yaml is a file"),
        (["train", "{run}"], "is a folder; give the YAML file in it"),
        (["eval", "{run}/config.yaml"], "neither a run directory"),
        (["report", "{run}/config.yaml"], "not a run directory"),
        (["report", "{run}", "--out", "{run}/config.yaml/none.html"], "config.yaml is not a folder that you may write to"),
        (["import", "{run}/config.yaml", "{run}/none"], "is not a directory"),
        (["eval", "{run}/none"], "no such file or directory"),
        (["train", "{run}/../config.yaml", "--out", "{run}"], "is not empty"),
        (["train", "{run}/../config.yaml", "--out", "{run}/none", "--resume"], "nothing to resume"),
        (["train", "{run}/../config.yaml", "rollout.top_p=0.9", "--out", "{run}/none"], "rollout.top_p"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    capsys.readouterr()
    assert main([text.replace("{run}", str(folder / "run")) for text in arguments]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("error: ") and named in printed[-1] and "Traceback" not in "".join(printed)
    assert not (folder / "run" / "none").exists()


def one_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """stdout as one JSON object; `json.loads` refuses anything before or after it."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("name", "key", "phase"), [("sft", "checkpoint", "cold start: "), ("run", "run", "training: ")])
def test_training_commands(folder: Path, name: str, key: str, phase: str) -> None:
    printed = json.loads((folder / f"{name}.json").read_text())
    result = json.loads(printed["stdout"])
    assert result[key] == str(folder / name) and result["metrics"]
    lines = printed["stderr"].splitlines()
    assert lines[0].startswith(phase) and lines[-1].startswith("step ")


@pytest.mark.parametrize(
    ("arguments", "keys", "phases"),
    [
        pytest.param(
            ["eval", "run"],
            {"pass_at_1", "low", "high"},
            ["reading run ...", "generating and verifying answers"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["mismatch", "run", "--precisions", "bf16", "--max-prompts", "2"],
            {"precisions", "limits"},
            ["reading run ...", "bf16: generating answers (1 of 2) ...", "bf16: compiling and measuring trainer bf16 (2 of 2) ..."],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["rollout", "run", "--out", "new/answers.jsonl", "--max-prompts", "1"],
            {"out", "pass_rate"},
            ["reading run ...", "generating 4 answers"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["report", "run", "--out", "page.html"], {"html", "png"}, ["drawing run ..."], marks=pytest.mark.slow),
        pytest.param(
            ["import", "huggingface", "from-huggingface"],
            {"checkpoint", "parameters"},
            ["importing huggingface ..."],
            marks=pytest.mark.slow,
        ),
        (["train", "config.yaml", "--dry-run"], {"config", "memory"}, []),
        pytest.param(["bench", "dequantize", "--small"], {"rows"}, ["timing dequantize ..."], marks=pytest.mark.slow),
        (["doctor"], {"devices", "versions"}, []),
    ],
)
def test_commands_with_results(folder: Path, program: Program, arguments: list[str], keys: set[str], phases: list[str]) -> None:
    if arguments[0] == "import":
        loaded = load_policy(folder / "run")
        save_hf_directory(folder / "huggingface", loaded.policy.family, loaded.policy.config, loaded.params)
    done = program(*arguments, "--json", cwd=folder)
    assert keys <= one_object(done).keys()
    lines = done.stderr.splitlines()
    assert len(lines) == len(phases) and all(line.startswith(phase) for line, phase in zip(lines, phases, strict=True)), done.stderr


@pytest.mark.slow
def test_ctrl_c_is_one_line(folder: Path, environment: dict[str, str]) -> None:
    """A terminal sends the interrupt to every process of the group, so the verifiers get it too."""
    command = [sys.executable, "-m", "trace_jax", "eval", "run", "--max-prompts", "200", "--samples", "64"]
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background program, and its children, ignore it
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        signal.signal(signal.SIGINT, former)
        assert running.stderr is not None and running.stdout is not None
        assert running.stderr.readline() == "reading run ...\n"
        assert running.stderr.readline().startswith("generating")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(120) == 1
        assert running.stderr.read() == "interrupted\n" and running.stdout.read() == ""
