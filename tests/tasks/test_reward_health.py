"""REW-01: a reward that fails is shown once, and ends the run when it fails on everything."""

import pytest

from trace_jax.errors import UserError
from trace_jax.tasks import Row, Verdict
from trace_jax.tasks.health import RewardHealth

ROWS = [Row(1, "two\nlines", "a"), Row(2, "other", "b")]
GOOD, BOOM, LATE = Verdict(0.0, False), Verdict.failed("ValueError: no\nnumber"), Verdict.failed("timeout")


def health() -> RewardHealth:
    return RewardHealth("my:reward", 2.5)


def test_the_first_error_is_shown_once(capsys):
    watched = health()
    for verdicts in ([GOOD, GOOD], [GOOD, BOOM], [LATE, GOOD]):
        watched.observe(ROWS, verdicts)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("warning: task.reward my:reward failed on the prompt 'other': ValueError: no number; such answers")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BOOM, "on the prompt 'two lines': ValueError: no number; mend it or choose another task.reward"),
        (LATE, "on the prompt 'two lines': cut off after 2.5 seconds; make it faster or raise task.verifier_timeout_s"),
    ],
)
def test_a_first_batch_without_a_verdict(error, text):
    with pytest.raises(UserError) as caught:
        health().observe(ROWS, [error, BOOM])
    assert str(caught.value) == f"task.reward my:reward has no verdict on any answer of the first batch; {text}"


def test_three_batches_in_a_row_without_a_verdict():
    watched = health()
    for verdicts in ([GOOD, BOOM], [BOOM, BOOM], [BOOM, LATE], [LATE, GOOD], [BOOM, BOOM], [BOOM, BOOM]):
        watched.observe(ROWS, verdicts)
    watched.observe([], [])  # says nothing either way
    with pytest.raises(UserError, match="has no verdict on any answer of 3 batches in a row; on the prompt 'two lines'"):
        watched.observe(ROWS, [BOOM, BOOM])
