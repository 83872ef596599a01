"""The supervised cold start: what it learns from, when it stops, and that training starts from its checkpoint."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.tasks import Row
from trace_jax.tokenizers import load_tokenizer
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.run_sft import run_sft
from trace_jax.train.sft import batch_width, sft_batch, sft_gradient, worked_example

ASCII = load_tokenizer("ascii")


def test_the_worked_answer_is_learned_not_the_gold_one():
    row = Row(0, "2+2?", "4", solution="2 and 2 is 4")
    ids, prompt = worked_example(row, ASCII)
    assert ids[:prompt] == ASCII.apply_prompt("2+2?")
    assert ASCII.decode(ids[prompt:-1]) == "2 and 2 is 4" and ids[-1] == ASCII.eos_id
    assert ASCII.decode(worked_example(Row(0, "q", "a"), ASCII)[0][-2:-1]) == "a"


def test_a_conversation_is_the_prompt():
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    ids, prompt = worked_example(Row(0, "ignored", "a", messages=messages), ASCII)
    assert ids[:prompt] == ASCII.apply_prompt(messages)


def test_only_answers_and_the_end_enter_the_loss():
    batch = sft_batch([Row(0, "q", "abc"), Row(1, "qqq", "")], ASCII, 16)
    prompt, longer = len(ASCII.apply_prompt("q")), len(ASCII.apply_prompt("qqq"))
    expected = np.zeros((2, 16), bool)
    expected[0, prompt : prompt + 4] = True
    expected[1, longer] = True  # an empty answer is the end alone
    np.testing.assert_array_equal(batch.sampled, expected)
    np.testing.assert_array_equal(np.asarray(batch.segment_ids).sum(1), [prompt + 4, longer + 1])


@pytest.mark.parametrize(("letters", "width"), [(1, 16), (12, 16), (13, 32)])
def test_batches_are_as_wide_as_the_longest_example_in_steps_of_16(letters, width):
    """bos, one letter, a newline, the answer, the end."""
    assert batch_width([Row(0, "q", "a"), Row(1, "q", "a" * letters)], ASCII, 32) == width


def test_an_example_beyond_the_context_is_refused_by_name():
    """The second one is bos, 9 letters, a newline, 6 letters and the end: 18 tokens, and a context of 18 holds it."""
    rows = [Row(7, "q", "a"), Row(8, "two\nlines", "abcdef"), Row(9, "q", "abc")]
    assert batch_width(rows, ASCII, 18) == 32
    with pytest.raises(UserError) as caught:
        batch_width(rows, ASCII, 17)
    assert str(caught.value) == (
        "prompt 8 ('two lines') has 18 tokens with its worked answer, more than the context of 17 (max_position of the model); "
        "shorten the row, or remove it from the task"
    )


def test_the_loss_falls(cold_start):
    losses = [step["sft/loss"] for step in cold_start.steps]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(np.log(131), rel=0.1)
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    assert [index for index, step in enumerate(cold_start.steps, 1) if "sft/pass_at_1" in step] == [20, 40, 60]
    assert [row["step"] for row in read_metrics(cold_start.directory)] == list(range(1, 61))


def test_the_checkpoint_is_complete(cold_start):
    loaded = load_policy(cold_start.directory)
    assert loaded.tokenizer == "ascii" and loaded.meta["progress"]["step"] == 60
    assert sorted(loaded.multipliers) == ["down_input", "expert_input", "k", "v"]
    assert all(np.all(np.asarray(value) > 0) for value in loaded.multipliers.values())
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(loaded.params))


def test_the_stop_rule(make_config, tmp_path):
    """A task with one answer is solved early; the split looked at is not the one that results are reported on."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{number:03d}", "answer": "a"}) + "\n" for number in range(90)))
    task = "{name: 'jsonl:" + str(rows) + "', reward: exact}"
    config = make_config(f"task={task}", "sft.steps=200", "sft.stop_pass_rate=0.5")
    assert config.sft.split_for_stop == "test" != config.eval.split
    directory = tmp_path / "run"
    directory.mkdir()
    metrics, stopped = run_sft(config, directory)
    assert not stopped
    last = read_metrics(directory)[-1]["step"]
    assert metrics["sft/pass_at_1"] >= 0.5 and last < 200 and last % config.sft.eval_every == 0
    assert load_policy(directory).meta["progress"]["step"] == last


def test_an_empty_split_for_the_stop_rule_is_refused(make_config, tmp_path):
    """Three questions: a split of them is empty."""
    config = make_config("task.params={min_word_len: 3, max_word_len: 3, size: 3}", "sft.steps=1", "sft.eval_every=1")
    with pytest.raises(UserError, match="is empty"):
        run_sft(config, tmp_path)


def test_gradients_that_stay_not_finite_end_the_cold_start(make_config, tmp_path, monkeypatch):
    """Two of them are skipped and counted; the third in a row is an error, and nothing that looks like a policy is left."""
    seen = []

    def spoiled(params, batch, **settings):
        gradient, loss, count = sft_gradient(params, batch, **settings)
        seen.append(None)
        bad = len(seen) in (1, 2) or len(seen) > 3
        return jax.tree.map(lambda leaf: leaf * np.nan, gradient) if bad else gradient, loss, count

    monkeypatch.setattr("trace_jax.train.run_sft.sft_gradient", spoiled)
    rows = []
    with pytest.raises(UserError, match="step 6: 3 gradients in a row were not finite; lower sft.learning_rate"):
        run_sft(make_config("sft.steps=20", "sft.eval_every=0"), tmp_path / "run", lambda step, metrics: rows.append(metrics))
    assert [row["train/skipped_updates"] for row in rows] == [1, 1, 0, 1, 1]
    assert not (tmp_path / "run").exists()
