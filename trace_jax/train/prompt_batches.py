"""The training stream in batches: `prompts_per_step` prompts with `group_size` answers each."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.rollout.engine import Engine, Request
from trace_jax.rollout.prompts import Scored, make_requests, score
from trace_jax.rollout.stream import RolloutStream
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.tasks import Row
from trace_jax.train.setup import Setup


@dataclass(frozen=True)
class PromptBatches:
    """Batch n of a run: prompts, sample ids and seeds follow from n and the config alone, whenever and however often it is generated."""

    setup: Setup

    @property
    def size(self) -> int:
        """Prompts of a batch."""
        return self.setup.config.rollout.prompts_per_step

    def rows(self, number: int) -> list[Row]:
        """The prompts."""
        return self.setup.task.prompts("train", number * self.size, self.size)

    def requests(self, number: int, audited: bool) -> list[Request]:
        """Requests for the answers, prompt after prompt.

        Args:
          audited: whether `guidance.audit.sequences` of them capture full codes.

        Raises:
          UserError: a prompt is too long.
        """
        config, setup = self.setup.config, self.setup
        group = config.rollout.group_size
        return make_requests(
            self.rows(number),
            setup.tokenizer,
            setup.sampling,
            group_size=group,
            first_sample=number * self.size * group,
            seed=config.seed,
            audited=min(config.guidance.audit.sequences, self.size * group) if audited else 0,
        )

    def score(self, number: int, trajectories: Trajectories) -> Scored:
        """Verifies the answers, which are in the order of the requests.

        Raises:
          UserError: the reward fails on every answer.
        """
        rows = [row for row in self.rows(number) for _ in range(self.setup.config.rollout.group_size)]
        return score(trajectories, rows, self.setup.task, self.setup.tokenizer)

    def stream(self, engine: Engine, first: int, version: int) -> RolloutStream:
        """What generates the batches from `first` on ahead of an asynchronous run, with an engine that has the weights of `version`."""
        config = self.setup.config
        return RolloutStream(
            engine,
            lambda number: self.requests(number, audited=is_due(number + 1, config.guidance.audit.every)),
            self.score,
            first=first,
            version=version,
            updates=config.train.updates_per_batch,
            max_staleness=config.sync.max_staleness,
        )


def is_due(number: int, every: int) -> bool:
    """Whether the step or batch with this number, counted from 1, is one of every `every`; 0 is never."""
    return every > 0 and number % every == 0
