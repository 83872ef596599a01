"""Sections about the course of a run: `sync`, `eval`, `calibration`, `mesh`, `checkpoint`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trace_jax.config.section import Count, Positive, Section, Split


class SyncSection(Section):
    """Weight transfer to the engine.

    Args:
      every: optimizer updates from one transfer to the next.
      max_staleness: by how many updates a sampled token may be older than the weights that train on it. More than `every` and
        `train.updates_per_batch` need makes training asynchronous: generation runs ahead by the rest.
    """

    every: Positive = 1
    max_staleness: Count = 0


class EvalSection(Section):
    """Held-out evaluation at the rollout's precision.

    Args:
      every: steps between evaluations; 0 is never.
      split: split of the task.
      samples: answers per prompt.
      max_prompts: prompts used, from the start of the split; null is all of them.
      greedy: the most probable token instead of sampling at `rollout.temperature`.
    """

    every: Count = 25
    split: Split = "validation"
    samples: Positive = 1
    max_prompts: Positive | None = None
    greedy: bool = False


class CalibrationSection(Section):
    """Static multipliers: real prompts used to measure the largest values, and the factor put on top of them."""

    prompts: Positive = 64
    headroom: Annotated[float, Field(ge=1)] = 1.5


class MeshSection(Section):
    """Devices along each axis; -1 is what is left."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1


class CheckpointSection(Section):
    """Steps between checkpoints, and how many are kept. The last step is always saved."""

    every: Positive = 50
    keep: Positive = 3
