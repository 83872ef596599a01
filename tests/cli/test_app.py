"""The program from outside: exit codes, one line per user error, JSON on stdout alone."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trace_jax import __version__
from trace_jax.cli.app import COMMANDS, commands, main, run
from trace_jax.cli.common import json_output, split_names, to_json
from trace_jax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
Program = Callable[..., subprocess.CompletedProcess[str]]


def test_help_lists_every_command(program: Program) -> None:
    result = program("--help")
    assert result.returncode == 0 and result.stderr == ""
    for name in COMMANDS:
        assert f" {name} " in result.stdout


def test_help_needs_no_array_library() -> None:
    check = "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'torch')))"
    code = f"import sys; from trace_jax.cli.app import main; main(['--help']); {check}"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage: trace-jax " + name in capsys.readouterr().out


def test_no_arguments_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trace-jax {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train"], "Missing argument"),
        (["train", "--nonsense", "x"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["train", "absent.yaml"], "absent.yaml: no such file"),
        (["train", str(ROOT / "configs/quickstart.yaml"), "rollout.grup_size=3"], "did you mean rollout.group_size?"),
        (["train", str(ROOT / "configs/quickstart.yaml"), "rollout.top_p=0.9"], "rollout.top_p"),
        (["sft", str(ROOT / "configs/quickstart.yaml"), "steps=none"], "steps is none"),
        (["eval", "x", "--samples", "0"], "--samples"),
        (["bench", "--out", "../x"], "plain name"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and part in shown.err
    assert shown.out == ""


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path, program: Program) -> None:
    result = program("train", str(ROOT / "configs/quickstart.yaml"), "steps=0", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: steps is 0") and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: None) == 0
    assert run(raising(UserError("first\n  second"))) == 2
    assert capsys.readouterr().err == "error: first second\n"
    assert run(raising(OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"))) == 2
    assert (
        capsys.readouterr().err
        == "error: no space left on the device while writing runs/x/metrics.jsonl; free some space or choose another folder\n"
    )
    assert run(raising(NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/x"))) == 2
    assert capsys.readouterr().err == "error: file/x: Not a directory; choose another path, or change its permissions\n"
    assert run(raising(PermissionError(errno.EACCES, "Permission denied", Path("runs")))) == 2
    assert capsys.readouterr().err.startswith("error: runs: Permission denied; ")
    assert run(raising(KeyboardInterrupt())) == 1
    assert capsys.readouterr().err == "interrupted\n"
    assert run(raising(SystemExit(3))) == 3
    assert run(raising(FileNotFoundError(errno.ENOENT, "No such file", "x"))) == 1
    assert "Traceback" in capsys.readouterr().err
    assert run(raising(ZeroDivisionError("oops"))) == 1
    assert "ZeroDivisionError: oops" in capsys.readouterr().err


def test_a_full_disk_behind_another_error_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "a/b")
        except OSError as error:
            raise RuntimeError("could not save") from error

    assert run(command) == 2
    assert "a/b" in capsys.readouterr().err


def test_a_real_full_device() -> None:
    body = "from trace_jax.cli.app import run\nimport sys\ndef f():\n  with open('/dev/full', 'w') as file: file.write('x' * 10)\n"
    code = body + "sys.exit(run(f))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.startswith("error: no space left") and result.stderr.count("\n") == 1


MUCH = "import sys; from trace_jax.cli.app import run; sys.exit(run(lambda: print('line\\n' * 200_000)))"
"""More output than a pipe holds, so that the writer always meets the closed end."""


@pytest.mark.parametrize(("program", "codes"), [(f'-c "{MUCH}"', {"1"}), ("-m trace_jax --help", {"0", "1"})])
def test_a_closed_pipe_is_no_traceback(program: str, codes: set[str]) -> None:
    command = f"{sys.executable} {program} | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stderr == "" and result.stdout.strip() in codes


def test_every_command_function_exists() -> None:
    import importlib

    for target in commands().values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_json_output_keeps_stdout_for_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    with json_output(True) as emit:
        print("chatter")
        emit({"a": float("nan"), "b": Path("x"), "c": (1, 2)})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"a": None, "b": "x", "c": [1, 2]} and shown.err == "chatter\n"


def test_json_values() -> None:
    import numpy as np

    assert to_json({"x": np.float32(0.5), "y": np.arange(2), 3: {True}, "inf": np.float64("inf")}) == {
        "x": 0.5,
        "y": [0, 1],
        "3": [True],
        "inf": None,
    }


def test_split_names() -> None:
    assert split_names(None) is None and split_names("a, b,") == ["a", "b"]
