"""REW-02: tables of answer strings with the verdicts they must get; and what reward functions may return."""

import json
import math
import sys
import time

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import Row, Task, Verdict, load_task
from trace_jax.tasks.answers import final_answer, looks_like_math, marked_answer
from trace_jax.tasks.math_verifier import as_math
from trace_jax.tasks.rewards import char_match, exact, text_answer, verdict_of
from trace_jax.tasks.verifiers import VerifierSpec

NESTED = "\\boxed{" + "(" * 300 + "3" + ")" * 300 + "}"

RIGHT = [
    # plain numbers
    ("42", "42"), ("42.", "42"), ("42.0", "42"), ("0042", "42"), ("+42", "42"), ("- 42", "-42"), ("\u221242", "-42"), ("1e3", "1000"),
    # commas and gaps
    ("1,000", "1000"), ("1000", "1,000"), ("1 000", "1000"), (r"1\,000", "1000"), (r"\boxed{8{,}000}", "8000"), ("$1,000.50", "1000.5"),
    # units, currency, percent
    ("42 apples", "42"), ("42cm", "42"), (r"\$42", "42"), (r"\boxed{42\text{ cm}}", "42"), (r"\boxed{42 \, \mathrm{cm}^2}", "42"),
    ("42%", "42"), (r"42\%", "42"), ("0.42", "42%"), ("50", "50%"),
    # fractions and LaTeX
    ("1/2", "0.5"), ("0.5", r"\frac{1}{2}"), (r"\boxed{\frac12}", "1/2"), (r"$\frac{1}{2}$", "0.5"),
    ("3 1/2", "3.5"), (r"3\frac{1}{2}", "3.5"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"), (r"\boxed{\text{42}}", "42"), ("2^{10}", "1024"), (r"\boxed{1.2\times 10^3}", "1200"),
    ("x^2+2x+1", "(x+1)^2"), ("(x+1)**2", "x^2+2*x+1"), ("x=5", "5"), ("(1, 2)", "(1,2)"), (r"\{1,2\}", r"\{2,1\}"), ("[0,1)", "[0, 1)"),
    # marks
    ("We add.\n#### 42", "42"), ("####42", "42"), ("#### -7", "-7"), ("#### Step 1\nwe get 3", "3"), ("The answer is 42.", "42"),
    ("The answer is: $42$.", "42"), ("**Answer:** 42", "42"), (r"the final answer is \(42\)", "42"), ("<answer> 42 </answer>", "42"),
    (r"<think>\boxed{1}</think><answer>\boxed{42}</answer>", "42"), ("2 + 2 = 4", "4"), (r"\boxed{2+2=4}", "4"),
    # several boxes: the last one is the answer; braces nest
    (r"\boxed{3}, no: \boxed{4}", "4"), (r"\boxed{\boxed{3}}", "3"), (r"\fbox{3}", "3"), (r"\boxed{\frac{1}{1+\frac{1}{2}}}", "2/3"),
    # a hanging power before the answer is not looked at (torchtitan#4442)
    ("The last digits of \\(2003^{2002^{2001}}\\) are:\n\\[Answer: 009\\]", "9"),
    # text
    ("Monday", "Monday"), (r"\boxed{\text{Monday}}", "Monday"), ("#### the  cat", "the cat"), ("A", "A"),
]  # fmt: skip

WRONG = [
    ("", "42"), ("   ", "42"), (r"\boxed{}", "42"), ("no idea", "42"), ("-42", "42"), ("42", "-42"),
    ("421", "42"), ("4.2", "42"), ("12,34", "1234"),
    ("0.3333", "1/3"), ("nan", "42"), ("inf", "42"), (r"\infty", "42"), ("forty-two", "42"), ("(2,1)", "(1,2)"), ("(0,1)", "[0,1)"),
    # the gold answer stands somewhere, but not as the answer
    ("42 is wrong. It is 41", "42"), ("#### 42\nNo, 41", "42"), ("#### 42 is not it, 41", "42"), (r"\boxed{42} or \boxed{41}", "42"),
    (r"\boxed{41} and so 42", "42"), ("40 41 42 43", "42"), ("#### 42 43", "42"), ("<answer>41</answer> 42", "42"),
    # the question given back, or a sum never worked out
    ("21*2", "42"), ("40+2", "42"), ("#### 44 - 2", "42"), (r"\boxed{21 \times 2}", "42"), ("(3+4)", "7"),
    # oversized
    ("9" * 5000, "9"), (NESTED, "3"), ("\\boxed{" * 500, "3"), ("{" * 3000, "3"), (r"\boxed{3", "3" * 2),
    ("Tuesday", "Monday"), ("not Monday", "Monday"), ("B", "A"),
]  # fmt: skip


@pytest.fixture(scope="module")
def math_task(tmp_path_factory):
    path = tmp_path_factory.mktemp("math") / "data.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "1"}))
    with load_task(f"jsonl:{path}", reward="auto", workers=2) as task:
        yield task


def test_rew_02_right_answers(math_task: Task):
    verdicts = math_task.score_batch([Row(0, "", gold) for _, gold in RIGHT], [text for text, _ in RIGHT])
    assert [case for case, verdict in zip(RIGHT, verdicts, strict=True) if verdict != Verdict(1.0, True)] == []


def test_rew_02_wrong_answers(math_task: Task):
    verdicts = math_task.score_batch([Row(0, "", gold) for _, gold in WRONG], [text for text, _ in WRONG])
    assert [(text[:40], gold, v) for (text, gold), v in zip(WRONG, verdicts, strict=True) if v != Verdict(0.0, False)] == []


def test_rew_01_expression_that_hangs_math_verify_is_an_error():
    with Task("t", {}, reward="math", verifier=VerifierSpec("math"), verifier_timeout_s=1.0, workers=1) as task:
        verdicts = task.score_batch([Row(0, "", "3")] * 3, ["3.0", "10^(10^10)", "4"])
    assert [verdict.correct for verdict in verdicts] == [True, False, False]
    assert [verdict.error is None for verdict in verdicts] == [True, False, True]


@pytest.mark.parametrize(
    "gold", ["42", "1,000", "$5", "50%", "1/2", r"\frac{1}{2}", "x^2", "(1,2)", "-3", r"\pi", r"42\text{ cm}", "1.5e3", r"\text{42}"]
)
def test_mathematical_gold_answers(gold):
    assert looks_like_math(gold)


@pytest.mark.parametrize("gold", ["", "cat", "B", "3 apples", "2024-01-05", "10:30", r"\text{Monday}", "no 5", "1st", "a,b", "été 5"])
def test_textual_gold_answers(gold):
    assert not looks_like_math(gold)


def test_final_answer_rules():
    assert final_answer("") == ""
    assert final_answer("a\nb\n\n") == "b"
    assert marked_answer("just text") is None
    assert marked_answer(r"\boxed{a\}b} c") == r"a\}b"
    assert marked_answer(r"\boxed {1} and \boxed{2") == "1"


@pytest.mark.parametrize("piece", ["\\boxed{", "<answer>", "answer ", "answer is ", "{", "}", "\\", "####", "\n", "answer:\n", " "])
def test_cutting_out_the_answer_is_fast_on_any_text(piece):
    start = time.monotonic()
    final_answer(piece * (200_000 // len(piece)))
    assert time.monotonic() - start < 2


def test_as_math_boxes_formulas_only():
    assert as_math("x^2") == r"\boxed{x^2}"
    assert as_math("42 apples") == "42 apples"
    assert as_math("$x$") == "$x$"
    assert as_math("-2 3/4") == r"\boxed{-\frac{11}{4}}"


def test_exact_and_text_answer():
    row = Row(0, "", "a  b")
    assert exact(" a b\n", row).correct
    assert not exact("#### a b", row).correct
    assert text_answer("#### a b", row).correct


@pytest.mark.parametrize(
    ("completion", "score"),
    [("abcd", 1.0), (" abcd\n", 1.0), ("abcx", 0.375), ("xbcd", 0.375), ("ab", 0.25), ("abcdabcd", 0.25), ("", 0.0), ("dcba", 0.0)],
)
def test_char_match(completion, score):
    assert char_match(completion, Row(0, "", "abcd")) == Verdict(score, score == 1.0)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (1, Verdict(1.0, True)),
        (0.5, Verdict(0.5, False)),
        (-1.0, Verdict(-1.0, False)),
        (True, Verdict(1.0, True)),
        ({"score": 0.7, "correct": True}, Verdict(0.7, True)),
        ({"score": 1.0, "acc": False}, Verdict(1.0, False)),
        ({"score": 2}, Verdict(2.0, True)),
        (Verdict(0.1, True), Verdict(0.1, True)),
    ],
)
def test_return_values(result, verdict):
    assert verdict_of(result) == verdict


@pytest.mark.parametrize("result", [None, "yes", math.nan, math.inf, [1.0], {"reward": 1}, {"score": None}])
def test_useless_return_values_are_errors_not_zero_rewards(result):
    verdict = verdict_of(result)
    assert verdict.error is not None
    assert verdict.error.startswith("the reward function returned")
    assert not verdict.correct


def test_inline_rewards_start_no_process(math_task):
    task = Task("t", {"train": [Row(0, "q", "a")]}, reward="exact", verifier=None)
    assert task.score(task.rows("train")[0], "a").correct
    task.start()
    task.close()
    text_only = Task("t", {"train": [Row(0, "q", "cat")]}, reward="auto", verifier=math_task._pool.spec)
    assert text_only.score(Row(0, "q", "cat"), "cat").correct
    assert text_only._pool is not None
    assert not text_only._pool._alive


def test_score_batch_needs_equal_lengths(math_task):
    with pytest.raises(ValueError, match="1 rows and 2 completions"):
        math_task.score_batch([Row(0, "", "1")], ["1", "2"])


def test_missing_packages_name_the_extra(monkeypatch):
    from trace_jax.tasks.math_verifier import math_verifier

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"needs the package math-verify; install"):
        math_verifier()
    with pytest.raises(UserError, match=r"needs the package reasoning-gym; install"):
        load_task("reasoning_gym:chain_sum")
