"""What is compared: presets, variants of a file, and one clear line for whatever cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.train.conftest import VALUES
from trace_jax.cli.app import main
from trace_jax.comparison.plan import Comparison, plan_comparison
from trace_jax.comparison.state import STATE, stored_start, write_state
from trace_jax.comparison.variants import COMMON, DEFAULT
from trace_jax.config.keys import known_keys
from trace_jax.errors import UserError

VARIANTS = """
last: {method: trace, guidance: {layers: "last:1"}}
codes: {method: trace_full, optimizer: {learning_rate: 1e-4}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration `tiny.yaml` and the variants `v.yaml`."""
    path = tmp_path_factory.mktemp("plan")
    (path / "tiny.yaml").write_text(yaml.safe_dump(VALUES))
    (path / "v.yaml").write_text(VARIANTS)
    return path


def test_presets_and_seeds(folder: Path) -> None:
    comparison = plan_comparison(folder / "tiny.yaml", ["seed=5"], names=["qat", "trace"], seeds=2)
    runs = comparison.runs()
    assert [run.name for run in runs] == ["qat-seed-5", "trace-seed-5", "qat-seed-6", "trace-seed-6"]
    assert [(run.config.method, run.config.seed) for run in runs] == [("qat", 5), ("trace", 5), ("qat", 6), ("trace", 6)]
    assert runs[0].config.train_quant.activations == "rtn" and runs[1].config.train_quant.activations == "guided"


def test_without_names_the_default_or_all_of_the_file(folder: Path) -> None:
    assert tuple(plan_comparison(folder / "tiny.yaml").variants) == DEFAULT
    assert list(plan_comparison(folder / "tiny.yaml", file=folder / "v.yaml").variants) == ["last", "codes"]


def test_variants_set_keys_beside_presets(folder: Path) -> None:
    comparison = plan_comparison(folder / "tiny.yaml", names=["bf16", "codes", "last"], file=folder / "v.yaml")
    assert list(comparison.variants) == ["bf16", "codes", "last"]
    assert comparison.variants["last"].guidance.layers == "last:1" and comparison.variants["last"].method == "trace"
    codes = comparison.variants["codes"]
    assert (codes.guidance.record, codes.optimizer.learning_rate, codes.steps) == ("codes", 1e-4, VALUES["steps"])


def test_what_is_common_to_all_runs_exists() -> None:
    assert set(COMMON) <= set(known_keys())


@pytest.mark.parametrize(
    ("words", "variants", "named"),
    [
        (["--methods", "qat,trase"], "", "--methods 'trase' is unknown; the nearest is 'trace'; write some of: bf16, naive, qat"),
        (["--methods", "qat,trace,qat"], "", "--methods names qat twice; name each method once"),
        (["--methods", ","], "", "--methods names nothing"),
        (["--seeds", "0"], "", "--seeds is 0; write 1 or more"),
        (["method=qat"], "", "leave method=... out and name the methods with --methods"),
        (["eval.every=0"], "", "eval.every is 0"),
        (["seed=4294967295", "--seeds", "2"], "", "too large for 2 seeds"),
        (["steps=0"], "", "steps is 0"),
        (["rollout.temperature=0"], "", "method bf16: rollout.temperature is 0"),
        (
            ["--methods", "in_fp8,trace", "rollout.activations=fp8"],
            "in_fp8: {method: qat}",
            "method trace: train_quant.activations is guided",
        ),
        (
            ["guidance.layers=all"],
            "a: {guidance: {layers: 'last:1'}}",
            "a sets guidance.layers, and so does guidance.layers=... on the command",
        ),
        (["--methods", "trace,same"], "same: {method: trace}", "trace and same are the same configuration"),
        ([], "a: {steps: 3}", "variant a sets steps, which all runs of a comparison share"),
        ([], "a: {model: {compute_dtype: bf16}}", "variant a sets model.compute_dtype, which all runs"),
        ([], "a: {rollout: {temperature: 0.5}}", "variant a sets rollout.temperature, which all runs"),
        ([], "qat: {method: qat}", "variant qat has the name of a preset"),
        ([], "a/b: {method: qat}", "variant a/b: the name becomes that of a folder"),
        ([], "a: {}", "variant a sets nothing"),
        ([], "a: qat", "variant a sets nothing"),
        ([], "- qat", "no variants; write a mapping"),
        ([], "a: {method: qat}\na: {method: trace}", "key 'a' is given twice"),
        ([], "a: {guidance: {layrs: all}}", "method a: guidance.layrs (in variant a of "),
        (["guidance.layrs=all"], "", "guidance.layrs (on the command line) is not a known key; did you mean guidance.layers?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], variants: str, named: str
) -> None:
    if variants:
        (tmp_path / "v.yaml").write_text(variants)
        words = [*words, "--variants", str(tmp_path / "v.yaml")]
    before = sorted(tmp_path.iterdir())
    assert main(["compare", str(folder / "tiny.yaml"), *words, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and named in shown.err, shown.err
    assert sorted(tmp_path.iterdir()) == before and shown.out == ""


def test_a_variants_file_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder / "tiny.yaml"), "--variants", str(folder / "none.yaml")]) == 2
    assert "none.yaml: cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.fixture
def begun(folder: Path, tmp_path: Path) -> Path:
    """A comparison of qat and trace with two seeds that has not got far."""
    write_state(tmp_path, plan_comparison(folder / "tiny.yaml", names=["qat", "trace"], seeds=2), tmp_path / "start")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--methods", "qat,trace", "--seeds", "2"], "is not empty; add --resume to continue it"),
        (["--methods", "qat,trace", "--resume"], "--seeds is 1, but the comparison in"),
        (["--methods", "qat", "--seeds", "2", "--resume"], "--methods leaves out trace"),
        (["--methods", "qat,trace", "--seeds", "2", "--resume", "rollout.group_size=2"], "rollout.group_size of method qat is 2, but"),
        (["--methods", "qat,trace", "--seeds", "2", "--resume", "steps=9"], "steps of method qat is 9, but the comparison in"),
        (["--methods", "qat,trace", "--seeds", "2", "--resume", "seed=1"], "seed of method qat is 1, but the comparison in"),
    ],
)
def test_another_comparison_is_refused_in_a_used_folder(
    folder: Path, begun: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    before = (begun / STATE).read_bytes()
    assert main(["compare", str(folder / "tiny.yaml"), *words, "--out", str(begun)]) == 2
    shown = capsys.readouterr().err
    assert shown.strip().splitlines()[-1].startswith("error: ") and named in shown
    assert [path.name for path in begun.iterdir() if path.name != ".lock"] == [STATE] and (begun / STATE).read_bytes() == before


def test_nothing_to_resume(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()  # of a run: no comparison
    assert main(["compare", str(folder / "tiny.yaml"), "--resume", "--out", str(tmp_path)]) == 2
    assert "nothing to resume (no comparison.yaml)" in capsys.readouterr().err


def test_a_resumed_comparison_may_have_more(folder: Path, begun: Path) -> None:
    def grown(*names: str, seeds: int) -> Comparison:
        return plan_comparison(folder / "tiny.yaml", names=names, seeds=seeds)

    assert stored_start(begun, grown("bf16", "trace", "qat", seeds=3)) == begun / "start"
    with pytest.raises(UserError, match="leaves out qat"):
        stored_start(begun, grown("bf16", "trace", seeds=3))


def test_what_a_run_would_refuse_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "v.yaml").write_text("deep: {method: trace, guidance: {layers: [7]}}")
    words = ["--methods", "qat,deep", "--variants", str(tmp_path / "v.yaml"), "--out", str(tmp_path / "out")]
    assert main(["compare", str(folder / "tiny.yaml"), *words]) == 2
    assert "guidance.layers is [7], but the model has 2 layers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_dry_run_shows_what_differs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", str(folder / "tiny.yaml"), "--methods", "qat,trace", "--seeds", "2", "--dry-run", *out]) == 0
    shown = capsys.readouterr().out
    assert "guidance.record" in shown and "task.name" not in shown and "4 runs, 16 steps in all, seeds 0, 1" in shown
    assert not (tmp_path / "out").exists()
