"""Generating and verifying: rows and answers stay together, and the time between the two can be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_jax.evaluation import answers
from trace_jax.evaluation.answers import scored_answers
from trace_jax.evaluation.rollout import _open
from trace_jax.train.setup import sync_weights


def test_every_answer_is_verified_with_its_own_row(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _open(config_file, [])
    setup = opened.setup(opened.config)
    engine = setup.engine()
    sync_weights(engine, setup, opened.params, opened.multipliers, 0)
    rows = opened.task.rows("validation")[:3]
    seen = []
    verify = answers.score

    def score(trajectories, of_each, task, tokenizer):
        seen.append([row.prompt_id for row in of_each])
        assert trajectories.prompt_id.tolist() == seen[-1]
        return verify(trajectories, of_each, task, tokenizer)

    monkeypatch.setattr(answers, "score", score)
    scored = scored_answers(
        engine,
        rows,
        opened.task,
        setup.tokenizer,
        setup.sampling,
        group_size=2,
        first_sample=10,
        seed=0,
        audited=1,
        generated=lambda: seen.append("generated"),
    )
    assert seen == ["generated", [row.prompt_id for row in rows for _ in range(2)]]
    assert scored.trajectories.sample_id.tolist() == list(range(10, 16)) and scored.trajectories.group.tolist() == [10, 10, 12, 12, 14, 14]
    assert scored.trajectories.audit is not None and scored.trajectories.audit.sequences.size == 1
    opened.task.close()
