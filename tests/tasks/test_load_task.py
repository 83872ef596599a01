"""Tasks and rewards by import path, and what `load_task` refuses."""

import textwrap

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import SPLITS, Task, Verdict, load_task

MODULE = """
from trace_jax.tasks import Row, Task

NUMBER = 3

def records(count):
    return [{"question": f"what is {n} + 1", "answer": n + 1} for n in range(count)]

def rows():
    return [Row(0, "q", "a", {"key": 1}), Row(0, "r", "b", messages=({"role": "system", "content": "s"}, {"role": "user", "content": "r"}))]

def task():
    return Task("mine", {"train": [Row(5, "q", "a")]}, reward="exact", verifier=None)

def two_parameters(completion, answer):
    return 1.0

def half(completion, answer, row):
    return {"score": 0.5, "correct": row.meta["key"] == 1}

def nothing():
    return []

def text():
    return "rows"
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_tasks.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_tasks.py").write_text("1 / 0")
    (tmp_path / "needy_tasks.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_callable_returns_records():
    task = load_task("user_tasks:records", {"count": 50}, question_pattern=r"is (.*)")
    assert sum(task.sizes.values()) == 50
    assert task.reward == "auto"
    assert all(int(row.question.split()[0]) + 1 == int(row.answer) for row in task.rows("train"))


def test_callable_returns_rows():
    task = load_task("user_tasks:rows", prompt_template="[{question}]", reward="exact")
    rows = sorted((row for split in SPLITS if task.sizes[split] for row in task.rows(split)), key=lambda row: row.answer)
    assert [row.question for row in rows] == ["[q]", "s\n\n[r]"]
    assert rows[0].meta == {"key": 1}
    assert rows[1].messages is not None
    assert rows[1].messages[1] == {"role": "user", "content": "[r]"}


def test_reward_by_import_path():
    with load_task("user_tasks:rows", reward="user_tasks:half", workers=1) as task:
        rows = [row for split in SPLITS if task.sizes[split] for row in task.rows(split)]
        verdicts = {row.answer: verdict for row, verdict in zip(rows, task.score_batch(rows, ["", ""]), strict=True)}
    assert verdicts["a"] == Verdict(0.5, True)
    assert verdicts["b"].error == "KeyError: 'key'"


def test_callable_returns_a_task():
    task = load_task("user_tasks:task")
    assert isinstance(task, Task)
    assert task.rows("train")[0].prompt_id == 5
    with pytest.raises(UserError, match="remove prompt_template, question_pattern and reward"):
        load_task("user_tasks:task", prompt_template="Q {question}")
    with pytest.raises(UserError, match="remove prompt_template, question_pattern and reward"):
        load_task("user_tasks:task", reward="exact")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spell_backward", {}, "task.name 'spell_backward' is unknown; write reasoning_gym:DATASET, jsonl:FILE or module:callable"),
        (
            "no_such_module:rows",
            {},
            r"task.name 'no_such_module:rows': importing no_such_module failed .* installed or in the current directory",
        ),
        ("user_tasks.sub:rows", {}, r"importing user_tasks.sub failed \(ModuleNotFoundError.*; write package.module:name of a module"),
        ("broken_tasks:rows", {}, r"importing broken_tasks failed \(ZeroDivisionError: division by zero\); mend the module"),
        ("needy_tasks:rows", {}, r"needy_tasks failed \(ModuleNotFoundError: No module named 'no_such_package'\); mend the module"),
        ("user_tasks:record", {}, "user_tasks has no 'record'; the nearest is 'records'; write user_tasks:FUNCTION"),
        ("user_tasks:NUMBER", {}, "is a int, not a function; write user_tasks:FUNCTION"),
        (":rows", {}, "not an import path"),
        ("user_tasks:nothing", {}, "has no rows; let the function return more rows"),
        ("user_tasks:text", {}, "returned str; return a list of rows"),
        ("user_tasks:records", {}, "task.name 'user_tasks:records' failed"),
        ("user_tasks:rows", {"reward": "exakt"}, "task.reward 'exakt' is unknown; the nearest is 'exact'"),
        ("user_tasks:rows", {"reward": "reasoning_gym"}, "scores reasoning_gym:DATASET only"),
        (
            "user_tasks:rows",
            {"reward": "user_tasks:nope"},
            "task.reward 'user_tasks:nope': user_tasks has no 'nope'; .*write user_tasks:FUNCTION",
        ),
        (
            "user_tasks:rows",
            {"reward": "broken_tasks:f"},
            r"task.reward 'broken_tasks:f': importing .*ZeroDivisionError.*; mend the module",
        ),
        ("user_tasks:rows", {"reward": "no_such_module:f"}, r"task.reward 'no_such_module:f': .*; write package.module:name of a module"),
        ("user_tasks:rows", {"reward": "user_tasks:two_parameters"}, r"does not take \(completion, answer, row\): too many positional"),
        ("user_tasks:rows", {"verifier_timeout_s": 0}, "task.verifier_timeout_s is 0"),
        ("user_tasks:rows", {"workers": 0}, "workers is 0; write 1 or more"),
        (
            "reasoning_gym:propositional_logic",
            {"params": {"size": 3}, "reward": "exact"},
            "no answer, which reward exact needs; set task.reward to another one",
        ),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        load_task(name, **options)
