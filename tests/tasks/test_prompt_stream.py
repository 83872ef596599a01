"""Splits, ids and the prompt stream."""

from collections import Counter

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import SPLITS, Task, load_task
from trace_jax.tasks.row import question_hash
from trace_jax.tasks.source import PromptForm, RawRow, split_rows
from trace_jax.tasks.stream import epoch_and_place, epoch_order, stream_indices

WORDS = {"min_word_len": 3, "max_word_len": 8}


@pytest.fixture(scope="module")
def spelling() -> Task:
    return load_task("reasoning_gym:spell_backward", {**WORDS, "size": 300}, question_pattern=r": (\w+)$", reward="exact", seed=3)


def raw(*questions: str) -> list[RawRow]:
    return [RawRow(f"row {number}", question, f"answer {number}") for number, question in enumerate(questions)]


def test_question_hash_is_the_same_in_every_process():
    assert question_hash("What is 1 + 1?") == (7867188531172604018, "train")
    shares = Counter(question_hash(f"question {number}")[1] for number in range(5000))
    assert shares["train"] == pytest.approx(4000, abs=150)
    assert shares["validation"] == pytest.approx(500, abs=100)


def test_no_question_in_two_splits(spelling):
    questions = {split: {row.question for row in spelling.rows(split)} for split in SPLITS}
    ids = [row.prompt_id for split in SPLITS for row in spelling.rows(split)]
    assert all(questions.values())
    assert sum(map(len, questions.values())) == len(set.union(*questions.values())) == sum(spelling.sizes.values())
    assert len(set(ids)) == len(ids)
    assert max(ids) < 1 << 64


def test_split_of_a_question_does_not_depend_on_seed_size_or_template(spelling):
    other = load_task(
        "reasoning_gym:spell_backward", {**WORDS, "size": 500}, question_pattern=r": (\w+)$", prompt_template="<{question}>", seed=3
    )
    where = {row.prompt_id: split for split in SPLITS for row in other.rows(split)}
    for split in SPLITS:
        assert all(where[row.prompt_id] == split for row in spelling.rows(split))
    assert other.rows("train")[0].question.startswith("<")


def test_ckpt_08_stream_is_a_pure_function_of_the_position(spelling):
    size = spelling.sizes["train"]
    whole = spelling.prompts("train", 0, 2 * size + 7)
    for start, count in ((0, 5), (size - 2, 5), (size, 1), (2 * size, 7)):
        assert spelling.prompts("train", start, count) == whole[start : start + count]
    again = load_task("reasoning_gym:spell_backward", {**WORDS, "size": 300}, question_pattern=r": (\w+)$", reward="exact", seed=3)
    assert again.prompts("train", 0, 2 * size + 7) == whole


def test_each_epoch_is_another_shuffle_of_all_rows(spelling):
    size = spelling.sizes["train"]
    first, second = spelling.prompts("train", 0, size), spelling.prompts("train", size, size)
    assert (
        sorted(row.prompt_id for row in first)
        == sorted(row.prompt_id for row in second)
        == sorted(r.prompt_id for r in spelling.rows("train"))
    )
    assert first != second
    assert first != spelling.rows("train")


def test_seed_changes_the_order():
    ids = tuple(range(50))
    assert epoch_order(ids, 0, 0) != epoch_order(ids, 1, 0)
    assert stream_indices(ids, 0, 0, 50) == list(epoch_order(ids, 0, 0))
    assert epoch_order((7, 8, 9, 10), 0, 0) == (3, 0, 2, 1)


def test_ckpt_11_epoch_and_place_at_the_boundary():
    assert [epoch_and_place(position, 20) for position in (0, 19, 20, 21)] == [(0, 0), (0, 19), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="position -1"):
        epoch_and_place(-1, 3)
    with pytest.raises(ValueError, match="0 rows"):
        epoch_and_place(0, 0)


def test_duplicates_are_dropped_and_counted():
    splits, duplicates = split_rows(raw("a", "b", "a", "a"), PromptForm.parse("{question}", None))
    assert sorted(row.question for rows in splits.values() for row in rows) == ["a", "b"]
    assert duplicates == 2


def test_template_keeps_other_braces():
    splits, _ = split_rows(raw("2+2"), PromptForm.parse(r"{question} Put it in \boxed{}.", None))
    assert [row.question for rows in splits.values() for row in rows] == [r"2+2 Put it in \boxed{}."]


@pytest.mark.parametrize(
    ("template", "pattern", "message"),
    [
        ("Q:", None, "does not contain {question}"),
        ("{question}", "(", r"task.question_pattern '\(' is not a regular expression \(.*\); mend the pattern"),
        ("{question}", "a+", "has no group"),
    ],
)
def test_bad_prompt_form(template, pattern, message):
    with pytest.raises(UserError, match=message):
        PromptForm.parse(template, pattern)


def test_pattern_that_finds_nothing_names_the_row():
    with pytest.raises(UserError, match=r"row 1: task.question_pattern .* finds nothing in 'b'"):
        split_rows(raw("a", "b"), PromptForm.parse("{question}", "(a)"))


def test_pattern_that_merges_different_questions_is_refused():
    with pytest.raises(UserError, match="equal to row 0 though the answers differ"):
        split_rows(raw("add 1 2", "subtract 1 2"), PromptForm.parse("{question}", r"(\d+ \d+)"))


def test_unknown_and_empty_split(spelling):
    with pytest.raises(UserError, match="no split 'dev'; write train, validation, test"):
        spelling.rows("dev")
    small = load_task("reasoning_gym:spell_backward", {**WORDS, "size": 1}, reward="exact")
    empty = next(split for split in SPLITS if not small.sizes[split])
    for use in (small.rows, lambda split: small.prompts(split, 0, 1)):
        with pytest.raises(UserError, match=rf"split '{empty}' .* is empty .*; raise task.params.size \(now 1\)"):
            use(empty)
