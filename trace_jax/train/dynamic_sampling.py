"""The answers that a step trains on, with DAPO's dynamic sampling where it is on.

1. Generate and verify `group_size` answers to the next `prompts_per_step` prompts of the training stream.
2. With `algorithm.filter_groups`, again until `prompts_per_step` groups have a signal (rewards of the task that are not all equal), at
   most `max_num_gen_batches` times.
3. Train on the first `prompts_per_step` groups with a signal; on fewer where the limit came first. If no group has one, on the first
   batch, in which only the penalty of overlong answers can make an advantage.

Source: DAPO (arXiv 2503.14476), section 3.2; names as in verl. Every answer stays in the figures of the step and in its file, so that
neither is biased by the choice. What a step takes from the stream depends on the answers, so it is counted and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from trace_jax.config import Config
from trace_jax.rl.advantages import groups_with_signal
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.stream import Batch
from trace_jax.rollout.trajectories import Trajectories


@dataclass(frozen=True)
class StepAnswers:
    """Answers of a step.

    Args:
      scored: all of them, verified.
      trained: indices of the sequences that enter the update, whole groups, ascending.
      batches: how many batches of prompts were taken from the stream.
      seconds: of generation.
      regenerated: answers that were generated again because their tokens were too old.
    """

    scored: Scored
    trained: Int64[np.ndarray, " S"]
    batches: int
    seconds: float
    regenerated: int

    def filtered_groups(self) -> int:
        """Groups that were generated and are not trained on."""
        group = self.scored.trajectories.group
        return np.unique(group).size - np.unique(group[self.trained]).size


def step_answers(config: Config, take: Callable[[int], Batch]) -> StepAnswers:
    """The answers of a step.

    Args:
      take: the next batch of the training stream, verified; gets the number of batches taken before it in this step.

    Raises:
      UserError: as `take` does.
    """
    filtering, count = config.algorithm.filter_groups, config.rollout.prompts_per_step
    parts: list[Batch] = []
    signals = 0
    for batch in range(filtering.max_num_gen_batches if filtering.enable else 1):
        parts.append(take(batch))
        signals += groups_with_signal(parts[-1].scored.reward, parts[-1].scored.trajectories.group).size
        if signals >= count:
            break
    scored = _joined([part.scored for part in parts])
    group = scored.trajectories.group
    trained = chosen_sequences(scored.reward, group, count) if filtering.enable else np.arange(group.size)
    return StepAnswers(scored, trained, len(parts), sum(part.seconds for part in parts), sum(part.regenerated for part in parts))


def chosen_sequences(rewards: Float32[np.ndarray, " B"], group: Int64[np.ndarray, " B"], count: int) -> Int64[np.ndarray, " S"]:
    """Indices of the sequences of the first `count` groups with a signal, in order of their ids; of the first groups if none has."""
    kept = groups_with_signal(rewards, group)
    return np.flatnonzero(np.isin(group, (kept if kept.size else np.unique(group))[:count]))


def _joined(parts: Sequence[Scored]) -> Scored:
    if len(parts) == 1:
        return parts[0]
    return Scored(
        Trajectories.concat([part.trajectories for part in parts]),
        np.concatenate([part.correct for part in parts]),
        np.concatenate([part.reward for part in parts]),
        sum(part.verifier_errors for part in parts),
    )
