"""`train --dry-run` refuses what the start of `train` refuses, with the same words."""

from __future__ import annotations

import json

import pytest

from trace_jax.errors import UserError
from trace_jax.train.dry_run import plan_run
from trace_jax.train.run import run_training


@pytest.mark.parametrize(
    ("answers", "override", "named"),
    [
        ({"train": "a", "test": "a"}, "steps=1", "split 'validation' of task .* is empty"),
        ({"validation": "a", "test": "a"}, "steps=1", "split 'train' of task .* is empty"),
        ({"train": "a", "validation": "a"}, "eval.split=test", "split 'test' of task .* is empty"),
        ({"train": "a", "validation": "a"}, "rollout.max_new_tokens=30", "exceeds the context of 32"),
        ({"train": "\u00e9", "validation": "a"}, "steps=1", "tokenizer ascii cannot encode"),
    ],
)
def test_what_train_refuses(make_config, tmp_path, answers, override, named):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"q{split}", "answer": answer, "split": split}) + "\n" for split, answer in answers.items())
    )
    config = make_config(f"task={{name: 'jsonl:{rows}', reward: exact}}", override)
    with pytest.raises(UserError, match=named) as dry:
        plan_run(config)
    with pytest.raises(UserError) as real:
        run_training(config, tmp_path / "run")
    assert str(dry.value) == str(real.value)
