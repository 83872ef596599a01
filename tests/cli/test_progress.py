"""Progress: plain lines where nobody looks at a screen, a bar on a terminal."""

from __future__ import annotations

import pytest

from trace_jax.cli.common import run_and_show
from trace_jax.cli.progress import Display


def work(shown: Display) -> dict[str, int]:
    print("chatter")
    shown.announce("reading [run]")
    shown.announce("measuring", 1, 3)
    return {"answer": 42}


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_show(work, lambda result: print(result["answer"]), json=False) == {"answer": 42}
    shown = capsys.readouterr()
    assert shown.err == "reading [run] ...\nmeasuring (2 of 3) ...\n" and shown.out == "chatter\n42\n"


def test_json_keeps_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    run_and_show(work, lambda result: print("for people"), json=True)
    shown = capsys.readouterr()
    assert shown.out == '{\n  "answer": 42\n}\n' and "chatter" in shown.err and "for people" not in shown.err


def test_steps(capsys: pytest.CaptureFixture[str]) -> None:
    def steps(shown: Display) -> dict[str, int]:
        report = shown.steps("training", 2)
        report(1, {"loss": 0.5})
        return {}

    run_and_show(steps, print, json=True)
    assert capsys.readouterr().err.splitlines() == [
        "training: reading and compiling before the first of 2 steps ...",
        "step     1  loss 0.5000",
    ]


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    run_and_show(work, lambda result: None, json=True)
    shown = capsys.readouterr()
    assert "1/3" in shown.err and "(2 of 3)" not in shown.err and shown.out == '{\n  "answer": 42\n}\n'
