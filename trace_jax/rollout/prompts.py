"""From task rows to engine requests, and from finished sequences to rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32

from trace_jax.errors import UserError
from trace_jax.rollout.engine import Request
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.sharding.processes import everywhere, gathered, own_part
from trace_jax.tasks import Row, Task
from trace_jax.tokenizers import Tokenizer

_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are drawn; `max_prompt_tokens` None leaves the limit to the model's context."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_tokens: int | None = None


def make_requests(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    settings: SamplingSettings,
    *,
    group_size: int,
    first_sample: int,
    seed: int,
    audited: int = 0,
) -> list[Request]:
    """`group_size` requests per row, row after row.

    Args:
      rows: prompts.
      settings: sampling.
      group_size: answers per prompt.
      first_sample: id of the first request; ids are consecutive, and the group id is the id of a group's first request.
      seed: seed of the run; a request's own seed follows from it and the sample id.
      audited: how many requests capture full codes, spread over the prompts.

    Raises:
      UserError: a prompt is longer than `max_prompt_tokens`.
    """
    total = len(rows) * group_size
    audit = {index * total // audited for index in range(audited)} if audited else set()
    requests = []
    for number, row in enumerate(rows):
        tokens = tokenizer.apply_prompt(row.prompt)
        if settings.max_prompt_tokens is not None and len(tokens) > settings.max_prompt_tokens:
            raise UserError(
                f"prompt {row.prompt_id} has {len(tokens)} tokens, more than rollout.max_prompt_tokens={settings.max_prompt_tokens}; "
                "raise it or filter the task's rows"
            )
        for member in range(group_size):
            index = number * group_size + member
            sample = first_sample + index
            requests.append(
                Request(
                    sample_id=sample,
                    prompt_id=row.prompt_id,
                    group=first_sample + number * group_size,
                    tokens=np.asarray(tokens, np.int32),
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=max(0, settings.top_k),
                    seed=sample_seed(seed, sample),
                    stop_token_ids=tuple(tokenizer.stop_ids),
                    audit=index in audit,
                )
            )
    return requests


def sample_seed(seed: int, sample_id: int) -> int:
    """32 well-mixed bits from the run's seed and a sample id (splitmix64, Steele et al. 2014)."""
    state = (sample_id * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) & 0xFFFFFFFF


@dataclass(frozen=True)
class Scored:
    """Trajectories with rewards (NaN where the verifier failed), and which answers are correct."""

    trajectories: Trajectories
    correct: Bool[np.ndarray, " B"]
    reward: Float32[np.ndarray, " B"]
    verifier_errors: int


def answer_texts(trajectories: Trajectories, tokenizer: Tokenizer) -> list[str]:
    """The sampled text of each sequence."""
    bounds = zip(trajectories.offsets[:-1], trajectories.offsets[1:], strict=True)
    return [tokenizer.decode(trajectories.tokens[a:b][trajectories.sampled[a:b]].tolist()) for a, b in bounds]


def score(trajectories: Trajectories, rows: Sequence[Row], task: Task, tokenizer: Tokenizer) -> Scored:
    """Verifies every answer.

    Args:
      rows: the row of each sequence.

    Returns:
      A verifier error gives a NaN reward, which the advantages leave out; it is never a wrong answer.

    Raises:
      UserError: the verifier fails on everything (see `RewardHealth`).
    """
    part = own_part(len(rows))  # of several processes, each verifies a part; all get the same rewards
    own = everywhere(lambda: task.score_batch(rows[part], answer_texts(trajectories, tokenizer)[part]))
    verdicts = sum(gathered(own), [])
    task.health.observe(rows, verdicts)
    failed = np.asarray([verdict.error is not None for verdict in verdicts], bool)
    reward = np.asarray([verdict.score for verdict in verdicts], np.float32)
    reward[failed] = np.nan
    correct = np.asarray([verdict.correct for verdict in verdicts], bool) & ~failed
    return Scored(trajectories.replace(reward=reward), correct, reward, int(failed.sum()))
