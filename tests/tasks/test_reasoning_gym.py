"""reasoning-gym as a source."""

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import SPLITS, load_task


def test_question_pattern_strips_spell_backward_to_the_word():
    task = load_task(
        "reasoning_gym:spell_backward",
        {"min_word_len": 3, "max_word_len": 8, "size": 200},
        question_pattern=r": (\w+)$",
        reward="char_match",
    )
    for split in SPLITS:
        assert all(row.answer == row.question[::-1] and 3 <= len(row.answer) <= 8 for row in task.rows(split))
    row = task.rows("train")[0]
    assert row.meta["entry"]["question"] == f"Spell this word backward (example: sun -> nus): {row.question}"
    assert row.prompt == row.question
    assert row.worked_answer == row.answer


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "simple_equations", "countdown", "number_sorting"])
def test_own_answers_score_full(name):
    with load_task(f"reasoning_gym:{name}", {"size": 40}, workers=1) as task:
        rows = task.rows("train")[:4]
        assert task.reward == "reasoning_gym"
        right = task.score_batch(rows, [f"<answer>{row.answer}</answer>" for row in rows])
        wrong = task.score_batch(rows, ["no idea"] * len(rows))
    assert all(verdict.correct and verdict.score == 1.0 and verdict.error is None for verdict in right)
    assert not any(verdict.correct or verdict.error for verdict in wrong)


def test_seed_of_the_task_or_of_params():
    tasks = [load_task("reasoning_gym:chain_sum", {"size": 20, **extra}, seed=seed) for seed, extra in ((1, {}), (2, {}), (2, {"seed": 1}))]
    questions = [[row.question for row in task.rows("train")] for task in tasks]
    assert questions[0] == questions[2] != questions[1]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("spel_backward", {}, "no data set 'spel_backward'; the nearest is 'spell_backward'"),
        ("gsm", {}, "no data set 'gsm'; the nearest is 'gsm_symbolic'"),
        ("Chain-Sum", {}, "the nearest is 'chain_sum'"),
        ("sum", {}, "the nearest is 'chain_sum'"),
        ("nope", {}, "no data set 'nope'; take one of reasoning_gym.factory.DATASETS"),
        ("spell_backward", {"min_word_length": 3}, r"task.params.min_word_length: .* the nearest is 'min_word_len'; it takes data_file"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 3}, r"refused \(max_word_len must be >= min_word_len\); change them"),
        ("spell_backward", {"min_word_len": "x"}, "are refused"),
        ("spell_backward", {"size": 0}, "task.params.size is 0"),
    ],
)
def test_bad_data_set(name, params, message):
    with pytest.raises(UserError, match=message):
        load_task(f"reasoning_gym:{name}", params)
