"""REW-01: verifiers that hang, crash or die are cut off, replaced and reported, never taken for wrong answers."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import SPLITS, Row, Task, Verdict, load_task
from trace_jax.tasks.pool import VerifierPool
from trace_jax.tasks.verifiers import VerifierSpec

MODULE = """
import os, signal, sys, time

def rows():
    return [{"question": "q", "answer": "right"}]

def judge(completion, answer, row):
    if completion == "slow":
        time.sleep(1)
    if "started" in row.meta:
        open(row.meta["started"], "a").close()
    if completion == "sleep":
        time.sleep(60)
    if completion == "nap":
        time.sleep(0.3)
    if completion == "spin":
        while True:
            pass
    if completion == "spin in C":
        10 ** 10 ** 10
    if completion == "raise":
        raise RuntimeError("no verdict today")
    if completion == "exit":
        os._exit(7)
    if completion == "print":
        print("noise on stdout")
    if completion == "chatter":
        print("thinking", file=sys.stderr)
        print("still thinking")
        print("x" * 100_000, file=sys.stderr)
    if completion == "jax":
        return {"score": float("jax" in sys.modules)}
    if completion == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(3)
        signal.alarm(0)
    if completion == "pid":
        return os.getpid()
    return 1.0 if completion == answer else 0.0
"""

ROW = Row(1, "q", "right", {"k": [1, 2]})
RIGHT, WRONG = Verdict(1.0, True), Verdict(0.0, False)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    (folder / "judge_module.py").write_text(MODULE)
    sys.path.append(str(folder))
    yield VerifierSpec("judge_module:judge")
    sys.path.remove(str(folder))


@pytest.fixture
def task(spec):
    with Task("t", {"train": [ROW]}, reward=spec.name, verifier=spec, verifier_timeout_s=0.4, workers=2) as task:
        yield task


def judge(task: Task, *completions: str) -> list[Verdict]:
    return task.score_batch([ROW] * len(completions), completions)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 20 seconds"
        time.sleep(0.01)


def test_rew_01_hanging_verifier_is_cut_off_and_the_rest_is_served(task):
    start = time.monotonic()
    verdicts = judge(task, "right", "sleep", "right", "spin", "wrong", "right", "spin in C", "wrong")
    assert [verdict.error for verdict in verdicts] == [None, "timeout", None, "timeout", None, None, "timeout", None]
    assert [verdict.correct for verdict in verdicts] == [True, False, True, False, False, True, False, False]
    assert time.monotonic() - start < 20


def test_rew_01_called_from_threads(task):
    results: dict[int, list[Verdict]] = {}

    def work(number: int) -> None:
        results[number] = judge(task, "right", "sleep" if number == 0 else "wrong", "right")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == [RIGHT, Verdict.failed("timeout"), RIGHT]
    assert all(results[number] == [RIGHT, WRONG, RIGHT] for number in (1, 2, 3))


def test_crash_exception_and_noise(task):
    verdicts = judge(task, "print", "raise", "right", "exit", "alarm", "right")
    assert verdicts[0] == WRONG
    assert verdicts[1].error == "RuntimeError: no verdict today"
    assert verdicts[3].error == "the verifier's worker died with exit code 7"
    assert [verdicts[index] for index in (2, 4, 5)] == [RIGHT, WRONG, RIGHT]


def test_what_a_reward_prints_does_not_flood_the_console(task, capfd, monkeypatch):
    """40 answers print 120 lines, over two workers and their replacements; the first are there at once, on stderr."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    assert judge(task, "print") == [WRONG]
    wait_until(lambda: shown.getvalue() == "noise on stdout\n")
    assert judge(task, "chatter", "exit", *["chatter"] * 39)[0] == WRONG
    task.close()
    assert judge(task, "chatter") == [WRONG]
    task.close()
    lines = shown.getvalue().splitlines()
    assert capfd.readouterr() == ("", "") and len(lines) == 6 and max(map(len, lines)) <= 1000
    assert lines[1] == "thinking" and lines[5].endswith("judge_module:judge prints more than 5 lines; the others are not shown")


def test_a_worker_that_cannot_start_tells_why(tmp_path, monkeypatch, capfd):
    """The module works in this process and ends the worker's, after more lines than are shown."""
    (tmp_path / "broken_module.py").write_text(
        "import os, sys\nif 'pytest' not in sys.modules:\n    print('line\\n' * 20)\n    sys.exit('no licence found')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="did not start .* exit code 1: no licence found.; mend task.reward"):
        VerifierPool(VerifierSpec("broken_module:judge"), 1.0, 1).start()
    assert capfd.readouterr().err.count("\n") == 6


def test_worker_killed_while_idle_is_replaced_without_an_error(task):
    pid = int(judge(task, "pid")[0].score)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    second = int(judge(task, "pid")[0].score)
    assert second != pid
    assert judge(task, "right") == [RIGHT]


def test_worker_killed_at_work_is_an_error(spec, tmp_path):
    """With a timeout longer than the test, so that nobody else ends the worker."""
    results: list[Verdict] = []
    busy = Row(1, "q", "right", {"started": str(tmp_path / "started")})
    task = Task("t", {"train": [ROW]}, reward=spec.name, verifier=spec, verifier_timeout_s=60.0, workers=1)
    pid = int(judge(task, "pid")[0].score)
    thread = threading.Thread(target=lambda: results.extend(task.score_batch([busy], ["sleep"])))
    thread.start()
    wait_until((tmp_path / "started").exists)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    task.close()
    assert results == [Verdict.failed("the verifier's worker died with exit code -9")]


def test_sigterm_to_every_process_of_a_job_ends_no_worker(spec, tmp_path):
    """A preempted trainer finishes its step, whose answers must still be verified; SIGKILL is the control above."""
    results: list[Verdict] = []
    busy = Row(1, "q", "right", {"started": str(tmp_path / "started")})
    task = Task("t", {"train": [ROW]}, reward=spec.name, verifier=spec, verifier_timeout_s=20.0, workers=1)
    pid = int(judge(task, "pid")[0].score)
    os.kill(pid, signal.SIGTERM)  # idle
    thread = threading.Thread(target=lambda: results.extend(task.score_batch([busy, ROW], ["nap", "pid"])))
    thread.start()
    wait_until((tmp_path / "started").exists)
    os.kill(pid, signal.SIGTERM)  # at work
    thread.join()
    task.close()
    assert [verdict.error for verdict in results] == [None, None] and int(results[1].score) == pid


def test_workers_say_nothing_by_themselves(task, capfd):
    """No warning of Python either: `-m` warns about a module that its own package has imported."""
    assert judge(task, "right") == [RIGHT]
    task.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("timeout_s", "error"), [(0.2, "timeout"), (20.0, None)])
def test_rew_01_the_timeout_of_the_config_decides(spec, timeout_s, error):
    with load_task(f"{spec.name.split(':')[0]}:rows", reward=spec.name, verifier_timeout_s=timeout_s, workers=1) as task:
        start = time.monotonic()
        verdict = task.score(next(task.rows(split)[0] for split in SPLITS if task.sizes[split]), "slow")
    assert verdict == (Verdict.failed("timeout") if error else WRONG)
    assert time.monotonic() - start >= (0.2 if error else 1.0)


def test_order_and_large_batches(task):
    completions = ["right" if number % 3 else "wrong" for number in range(500)]
    verdicts = judge(task, *completions)
    assert [verdict.correct for verdict in verdicts] == [text == "right" for text in completions]
    big = Row(1, "q", "right", {"blob": "x" * 300_000})
    assert task.score_batch([big] * 3, ["right", "wrong", "right"]) == [RIGHT, WRONG, RIGHT]


def test_row_that_cannot_be_sent_is_an_error_of_its_own(task):
    rows = [ROW, Row(2, "q", "right", {"hook": lambda: None}), ROW]
    verdicts = task.score_batch(rows, ["right"] * 3)
    assert [verdicts[0], verdicts[2]] == [RIGHT, RIGHT]
    assert verdicts[1].error is not None
    assert verdicts[1].error.startswith("the row cannot be sent to the verifier")


def test_workers_never_import_jax_and_end_with_the_task(task):
    assert judge(task, "jax") == [WRONG]
    pids = {int(verdict.score) for verdict in judge(task, *["pid"] * 40)}
    assert len(pids) <= 2 and os.getpid() not in pids and all(alive(pid) for pid in pids)
    task.close()
    assert not any(alive(pid) for pid in pids)
    assert judge(task, "right") == [RIGHT]


@pytest.mark.parametrize("last", ["right", "sleep", "spin in C"])
def test_workers_die_with_a_killed_parent(spec, tmp_path, last):
    """The parent waits for the worker for ever; it is killed while the worker is at work or, after "right", idle."""
    started = str(tmp_path / "started")
    code = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from trace_jax.tasks import Row
from trace_jax.tasks.pool import VerifierPool
from trace_jax.tasks.verifiers import VerifierSpec
pool = VerifierPool(VerifierSpec({spec.name!r}), 1.0, 1)
print(int(pool.verify([("pid", Row(1, "q", "right"))])[0].score), flush=True)
pool.timeout_s = 60
pool.verify([({last!r}, Row(1, "q", "right", {{"started": {started!r}}}))])
threading.Event().wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(Path(started).exists)
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(pid))


def test_missing_function_is_a_user_error_at_start(spec):
    pool = VerifierPool(VerifierSpec("judge_module:nothing"), 1.0, 1)
    for _ in range(2):
        with pytest.raises(UserError, match="judge_module has no 'nothing'"):
            pool.start()
    assert not pool._alive
