"""How a worker starts, what is said when it does not, and that neither side outlives the other unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_bridge.engine.errors import WorkerDied
from rollout_bridge.engine.process import vllm_command
from rollout_bridge.engine.worker_folder import write_worker_folder
from rollout_bridge.wire.code_version import code_checksum
from tests.rollout_bridge.engine import scripted
from tests.rollout_bridge.engine.script_answers import requests
from trace_jax.errors import UserError


def test_the_folder_has_the_same_code_and_an_entry_point(worker_folder: Path):
    assert code_checksum(worker_folder / "rollout_bridge") == code_checksum()
    names = {path.name for path in (worker_folder / "rollout_bridge").iterdir()}
    assert names - {"__pycache__"} == {"__init__.py", "vllm_plugin", "wire"}  # a worker that ran has left its compiled modules
    program = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='vllm.general_plugins', name='trace_jax')])"
    environment = os.environ | {"PYTHONPATH": str(worker_folder)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout
    assert "rollout_bridge.vllm_plugin.plugin:register" in shown


def test_a_worker_starts_answers_and_ends_in_order(connect, tmp_path: Path):
    link = connect()
    assert link.ready == {"type": "ready", "engine": "script", "max_model_len": scripted.CONTEXT}
    link.send({"type": "health", "call": 5})
    assert link.receive(5.0)["call"] == 5
    link.close()
    link.close()
    assert link._process.returncode == 0 and (tmp_path / "vllm.log").read_text() == ""


def test_a_worker_ends_with_its_trainer_even_within_a_step(connect, tmp_path: Path):
    """A trainer that is killed closes nothing itself; its sockets just end."""
    link = connect(hangs_at=1)
    link.send({"type": "resume", "call": 0})
    link.send({"type": "submit", "requests": [{**vars(requests(1)[0]), "tokens": [1], "id": 0}]})
    while (tmp_path / "once").exists():  # removed as the step begins to hang
        time.sleep(0.01)
    link._channel.close()
    assert link._process.wait(20) == 0


def test_a_worker_that_is_killed_is_noticed_at_once(connect, tmp_path: Path):
    link = connect()
    os.kill(link.pid, 9)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"killed by SIGKILL; see {tmp_path}/vllm.log"):
        link.receive(30.0)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        link.send({"type": "resume", "call": 0})
    assert time.monotonic() - started < 5


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_missing_interpreter(connect):
    with pytest.raises(UserError) as error:
        connect(program=vllm_command("/nowhere/bin/python"))
    wanted = "rollout.vllm.python: /nowhere/bin/python cannot be run (No such file or directory); write the Python of an environment that"
    assert one_line(error) == f"{wanted} has vLLM"


def test_a_relative_interpreter_is_that_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker runs in another folder; and a link into a virtual environment stays one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert vllm_command("bin/python")[0] == str(tmp_path / "bin" / "python")
    assert vllm_command("python3")[0] == "python3"


def test_an_interpreter_without_numpy(connect):
    program = [sys.executable, "-c", "import sys; sys.modules['numpy'] = None; import rollout_bridge.vllm_plugin.serve.loop"]
    with pytest.raises(UserError, match="did not start: ModuleNotFoundError: import of numpy halted.*exit code 1; see "):
        connect(program=program)


def test_an_interpreter_without_vllm(connect):
    """The real worker's own program; this environment has no vLLM."""
    with pytest.raises(UserError, match="did not start: no vLLM is installed and trace-jax supports 0.26, 0.32"):
        connect(program=vllm_command(sys.executable))


def test_a_model_that_does_not_load(connect):
    with pytest.raises(UserError) as error:
        connect(fails_to_load="the KV cache\nneeds 3 GiB")
    assert "did not start: the KV cache needs 3 GiB (exit code 1; see " in one_line(error)


def test_a_worker_that_takes_too_long_is_ended(connect):
    with pytest.raises(UserError, match="was not ready after 1.5 s; see .*vllm.log, or raise rollout.vllm.start_timeout_s"):
        connect(load_s=30.0, start_timeout_s=1.5)


def test_a_worker_of_another_code_version(connect, tmp_path: Path):
    folder = write_worker_folder(tmp_path / "other")
    with open(folder / "rollout_bridge" / "wire" / "waiting.py", "a") as file:
        file.write("# another version\n")
    with pytest.raises(UserError) as error:
        connect(folder=folder)
    assert "runs another version of rollout_bridge than the trainer; remove the copy" in one_line(error)
