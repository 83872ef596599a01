"""Answers to the rows of a task, generated and verified: what training, evaluation and `rollout` all begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trace_jax.rollout.engine import Engine, generate
from trace_jax.rollout.prompts import SamplingSettings, Scored, make_requests, score
from trace_jax.tasks import Row, Task
from trace_jax.tokenizers import Tokenizer


def scored_answers(
    engine: Engine,
    rows: Sequence[Row],
    task: Task,
    tokenizer: Tokenizer,
    settings: SamplingSettings,
    *,
    group_size: int,
    first_sample: int,
    seed: int,
    audited: int = 0,
    generated: Callable[[], object] = lambda: None,
) -> Scored:
    """`group_size` verified answers per row, row after row.

    Args:
      engine: has weights and no other requests.
      first_sample, seed, audited: as in `make_requests`.
      generated: called when all answers are there and none is verified yet, to take the time.

    Raises:
      UserError: a prompt is too long, or the verifier fails on everything.
    """
    requests = make_requests(rows, tokenizer, settings, group_size=group_size, first_sample=first_sample, seed=seed, audited=audited)
    trajectories = generate(engine, requests)
    generated()
    return score(trajectories, [row for row in rows for _ in range(group_size)], task, tokenizer)
