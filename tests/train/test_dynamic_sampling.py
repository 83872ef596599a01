"""Dynamic sampling: which groups are trained on, the bound, the figures, and a resume that goes on where the stream stands."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.dynamic_sampling import chosen_sequences
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run import run_training

NAN = float("nan")


def test_the_first_groups_with_a_signal_are_chosen():
    group = np.array([0, 0, 4, 4, 8, 8, 12, 12, 16, 16])
    rewards = np.array([1, 1, 0, 1, NAN, 1, 1, 0, 0, 1], np.float32)  # 0 is constant, 8 has one verdict
    np.testing.assert_array_equal(chosen_sequences(rewards, group, 2), [2, 3, 6, 7])
    np.testing.assert_array_equal(chosen_sequences(rewards, group, 9), [2, 3, 6, 7, 8, 9])
    # Order of the batch does not matter, ids do.
    order = np.array([9, 0, 7, 2, 5, 4, 3, 6, 1, 8])
    np.testing.assert_array_equal(order[chosen_sequences(rewards[order], group[order], 2)], [7, 2, 3, 6])
    # Nobody has a signal: the first groups, whose advantages are 0.
    np.testing.assert_array_equal(chosen_sequences(np.ones(10, np.float32), group, 2), [0, 1, 2, 3])


LIMIT = 3
DAPO = (
    "algorithm.name=dapo",
    f"algorithm.filter_groups.max_num_gen_batches={LIMIT}",
    "algorithm.overlong_buffer.len=4",
    "task.reward=exact",  # right or wrong: groups without a signal are common
    "eval.every=0",
    "checkpoint.every=1",
    "guidance.audit.every=1",
    "train.unguided_every=0",
    "steps=3",
)


@pytest.fixture(scope="module")
def config(make_config, cold_start):
    return make_config(f"model.source={cold_start.directory}", *DAPO)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, config):
    directory = tmp_path_factory.mktemp("straight")
    run_training(config, directory)
    return directory


def answers_of(directory, step):
    return [json.loads(line) for line in (directory / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def figures(directory):
    rows = [row for row in read_metrics(directory) if row["step"]]
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))} for row in rows]


def test_figures_count_the_batches_and_the_filtered_groups(straight):
    rows = figures(straight)
    batches = [int(row["train/num_gen_batches"]) for row in rows]
    assert max(batches) > 1, "nothing was resampled, so this run proves nothing"
    assert all(1 <= count <= LIMIT for count in batches)
    for step, (row, count) in enumerate(zip(rows, batches, strict=True), 1):
        answers = answers_of(straight, step)
        assert len(answers) == count * 2 * 4  # all of them are kept in the file
        rewards = np.array([answer["reward"] for answer in answers]).reshape(-1, 4)
        signal = rewards.min(1) != rewards.max(1)
        assert row["frac_reward_zero_std"] == pytest.approx(1 - signal.mean())
        assert row["reward/mean"] == pytest.approx(rewards.mean())
        trained = min(2, signal.sum()) or 2
        assert row["train/filtered_groups"] == len(rewards) - trained
        # It stopped as soon as it had two, or at the limit.
        assert count == LIMIT or (signal.sum() >= 2 and signal[:-2].sum() < 2)
        assert -1 <= row["reward/overlong_mean"] <= 0


def test_a_resumed_run_goes_on_where_the_stream_stands(straight, config, tmp_path):
    """Bit-equal state, figures and answers, with a stop between steps of several batches."""
    run_training(config.model_copy(update={"steps": 2}), tmp_path)
    run_training(config, tmp_path, resume=True)
    states = []
    for directory in (straight, tmp_path):
        checkpoints = Checkpoints(directory / "checkpoints")
        states.append(checkpoints.restore(3, make_optimizer(config.optimizer))[1:])
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, states[1][0], states[0][0])
    batches = sum(int(row["train/num_gen_batches"]) for row in figures(straight))
    assert states[0][1] == states[1][1] == Progress(step=3, version=3, data_position=2 * batches, samples=8 * batches, seed=0)
    assert json.dumps(figures(tmp_path)) == json.dumps(figures(straight))
    samples = [answer["sample_id"] for step in (1, 2, 3) for answer in answers_of(tmp_path, step)]
    assert samples == list(range(8 * batches))
