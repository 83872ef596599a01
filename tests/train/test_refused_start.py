"""A start that is refused, or stopped before it began, leaves no trace; one that works makes its own folder."""

from __future__ import annotations

import signal

import pytest
import yaml

from trace_jax.cli.app import main
from trace_jax.errors import UserError
from trace_jax.train.run import run_training
from trace_jax.train.run_folder import Ended, claimed, run_directory
from trace_jax.train.run_sft import run_sft

TINY_TASK = "task.params={min_word_len: 3, max_word_len: 3, size: 3}"
"""Three questions: some split of them is empty."""

STOPPING_TASK = """
import signal

def rows():
    signal.raise_signal(signal.SIGTERM)
    return [{"question": f"q{number}", "answer": "a"} for number in range(90)]
"""


@pytest.fixture
def config_file(values, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("tokenizer=/no/such/tokenizer", "/no/such/tokenizer"),
        ("model.source=/no/such/run", "/no/such/run: no such file or directory"),
        ("model.config.vocab_size=100", "vocab_size"),
        ("model.config.hidden_siez=64", "hidden_siez"),
        ("rollout.max_new_tokens=30", "exceeds the context of 32"),
        ("rollout.max_prompt_tokens=3", "rollout.max_prompt_tokens=3"),
        ("task.name=jsonl:/no/such/file.jsonl", "/no/such/file.jsonl"),
        ("task.reward=no.such:reward", "no.such"),
        (TINY_TASK, "is empty"),
    ],
)
def test_a_refused_start_leaves_nothing(config_file, tmp_path, capsys, command, override, named):
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(config_file), override, "--out", str(tmp_path / "runs" / "new")]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("error: ") and named in printed[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_example_beyond_the_context_is_refused_by_sft(config_file, tmp_path, capsys):
    """The prompts and answers of the rollout fit, the worked answers do not."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "q{number:03d}", "answer": "{"a" * 40}"}}\n' for number in range(90)))
    task = f"task={{name: 'jsonl:{rows}', reward: exact}}"
    assert main(["sft", str(config_file), task, "--out", str(tmp_path / "new")]) == 2
    assert "more than the context of 32" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("start", [run_training, run_sft])
def test_sigterm_before_anything_is_written(make_config, tmp_path, monkeypatch, capfd, start):
    """The signal comes while the task is loaded: the program sets up, sees it, and ends as if it had not been started."""
    (tmp_path / "stopping_task.py").write_text(STOPPING_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    former = signal.getsignal(signal.SIGTERM)
    config = make_config("task={name: 'stopping_task:rows', reward: exact}")
    assert start(config, tmp_path / "run") == Ended({}, stopped=True)
    assert capfd.readouterr().err == "stopping after this step\nstopped before anything was written\n"
    assert not (tmp_path / "run").exists() and signal.getsignal(signal.SIGTERM) == former


def test_a_second_lock_is_refused_until_the_first_ends(tmp_path):
    out = tmp_path / "run"
    with claimed(out, resume=None):
        with pytest.raises(UserError, match="in use by another program"):
            with claimed(out, resume=None):
                pass
    assert not out.exists()
    with claimed(out, resume=None):
        (out / "config.yaml").touch()
    with pytest.raises(UserError, match="not empty; choose another --out"):
        with claimed(out, resume=None):
            pass
    with claimed(out, resume=True):
        pass
    assert sorted(path.name for path in out.iterdir()) == [".lock", "config.yaml"]


def test_the_lock_file_of_a_killed_start_is_no_run(tmp_path):
    """What `kill -9` leaves before the first file: neither in the way of a new start, nor something to resume."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert run_directory(tmp_path / "run", "name", resume=False) == tmp_path / "run"
    with pytest.raises(UserError, match="nothing to resume"):
        run_directory(tmp_path / "run", "name", resume=True)
    with claimed(tmp_path / "run", resume=False):
        pass
    assert not list((tmp_path / "run").iterdir())
