"""JSON-lines files and records in the forms of the field; every bad input has a message with its place."""

import json

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import SPLITS, Row, load_task
from trace_jax.tasks.records import record_row


def write(path, rows) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return f"jsonl:{path}"


def all_rows(task) -> list[Row]:
    return [row for split in SPLITS if task.sizes[split] for row in task.rows(split)]


@pytest.mark.parametrize(
    ("record", "question", "answer", "worked"),
    [
        ({"question": "1+1?", "answer": "2"}, "1+1?", "2", "2"),
        ({"prompt": "1+1?", "solution": "so 2"}, "1+1?", "so 2", "so 2"),
        ({"problem": "1+1?", "target": 2}, "1+1?", "2", "2"),
        ({"prompt": "1+1?", "label": "2"}, "1+1?", "2", "2"),
        ({"question": "1+1?", "answer": "One and one.\n#### 2"}, "1+1?", "2", "One and one.\n#### 2"),
        ({"question": "1+1?", "answer": "#### 1,000"}, "1+1?", "1,000", "#### 1,000"),
        ({"problem": "1+1?", "solution": r"Thus \boxed{2}."}, "1+1?", "2", r"Thus \boxed{2}."),
        ({"problem": "1+1?", "answer": "2", "solution": "One and one."}, "1+1?", "2", "One and one."),
        (
            {"data_source": "x", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}},
            "1+1?",
            "2",
            "2",
        ),
    ],
)
def test_forms(tmp_path, record, question, answer, worked):
    (row,) = all_rows(load_task(write(tmp_path / "data.jsonl", [record])))
    assert (row.question, row.answer, row.worked_answer) == (question, answer, worked)
    for key in ("data_source", "reward_model"):
        assert row.meta.get(key) == record.get(key)


def test_conversations_keep_their_messages(tmp_path):
    record = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}], "answer": "2"}
    (row,) = all_rows(load_task(write(tmp_path / "data.jsonl", [record]), prompt_template="{question} Now."))
    assert row.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1? Now."})
    assert row.prompt == row.messages
    assert row.question == "Be brief.\n\n1+1? Now."


def test_split_field_wins(tmp_path):
    rows = [{"question": f"q{n}", "answer": n, "split": split} for n, split in enumerate(["train", "val", "validation", "dev", "test"] * 4)]
    task = load_task(write(tmp_path / "data.jsonl", rows))
    assert task.sizes == {"train": 4, "validation": 12, "test": 4}
    assert {row.question for row in task.rows("test")} == {"q4", "q9", "q14", "q19"}


def test_named_split_beats_an_unnamed_duplicate(tmp_path):
    rows = [{"question": "same", "answer": 1}, {"question": "same", "answer": 1, "split": "test"}]
    task = load_task(write(tmp_path / "data.jsonl", rows))
    assert task.sizes == {"train": 0, "validation": 0, "test": 1}
    assert task.duplicates == 1


def test_files_for_splits(tmp_path):
    main = write(tmp_path / "train.jsonl", [{"question": f"q{n}", "answer": n} for n in range(60)])
    write(tmp_path / "test.jsonl", [{"question": f"q{n}", "answer": n} for n in range(57, 70)])
    task = load_task(main, {"test": str(tmp_path / "test.jsonl")})
    assert {row.question for row in task.rows("test")} == {f"q{n}" for n in range(57, 70)}
    assert task.sizes["train"] + task.sizes["validation"] == 57
    assert task.sizes["validation"] > 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "a", "answer": "1"}', "", "{oops"], r"data.jsonl line 3 is not JSON \(Expecting property name"),
        (["[1]"], r"data.jsonl line 1 is a list, not an object"),
        (['{"q": "a", "answer": "1"}'], r"line 1 has no question among its keys \(q, answer\); name it question, prompt, problem"),
        (['{"question": "a", "result": "1"}'], r"line 1 has no answer among its keys \(question, result\); name it answer, target"),
        (['{"question": " ", "answer": "1"}'], r"line 1: question is empty"),
        (['{"question": "a", "answer": ""}'], r"line 1: answer is empty"),
        (['{"question": "a", "answer": null}'], r"line 1: answer is a NoneType; write text or a number"),
        (['{"question": "a", "answer": ["1"]}'], r"line 1: answer is a list"),
        (['{"prompt": [{"role": "user"}], "answer": "1"}'], r"line 1: prompt is neither text nor a list of messages"),
        (['{"prompt": 3, "answer": "1"}'], r"line 1: prompt is neither text"),
        (['{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}'], r"line 1: prompt ends with a 'assistant' message"),
        (['{"prompt": "a", "reward_model": {"style": "rule"}}'], r"line 1: reward_model has no ground_truth"),
        (['{"question": "a", "answer": "1", "split": "holdout"}'], r"line 1: split is 'holdout'; write train, validation or test"),
        (['{"question": "a", "answer": "1", "split": ["train"]}'], r"line 1: split is \['train'\]; write train, validation or test"),
        (
            ['{"question": "a", "answer": "1", "split": "train"}', '{"question": "a", "answer": "1", "split": "test"}'],
            r"line 2: the question already stands in split 'train' at .*line 1",
        ),
        ([], r"data.jsonl' has no rows"),
    ],
)
def test_bad_rows(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        load_task(write(tmp_path / "data.jsonl", lines))


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match=r"missing.jsonl' cannot be read \(No such file or directory\); write jsonl:FILE"):
        load_task(f"jsonl:{tmp_path}/missing.jsonl")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        load_task(f"jsonl:{tmp_path}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "\xe4", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"latin.jsonl line 2 is not UTF-8 text \(byte 14\)"):
        load_task(f"jsonl:{tmp_path}/latin.jsonl")
    with pytest.raises(UserError, match="task.params.train is unknown"):
        load_task(write(tmp_path / "data.jsonl", [{"question": "a", "answer": "1"}]), {"train": "x"})
    with pytest.raises(UserError, match="task.params.test is 3; write the path of a JSON-lines file"):
        load_task(write(tmp_path / "data.jsonl", [{"question": "a", "answer": "1"}]), {"test": 3})


def test_unusual_values_are_kept():
    row = record_row({"question": "a", "answer": 0.5, "level": 3}, "here")
    assert row.answer == "0.5"
    assert row.meta["level"] == 3
