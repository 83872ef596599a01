"""What a resumed run may change, and what it clears away before it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trace_jax.config import Config, from_mapping
from trace_jax.config.keys import leaves
from trace_jax.errors import UserError

MAY_CHANGE = (
    "steps",
    "loggers",
    "mesh",
    "eval",
    "checkpoint",
    "sft",
    "guidance.audit",
    "guidance.cache_budget_mb",
    "optimizer.decay_steps",
    "optimizer.learning_rate",
    "rollout.engines",
    "rollout.launcher",
    "rollout.max_batch",
    "rollout.ray",
    "task.verifier_timeout_s",
    "train.micro_batch_tokens",
    "train.remat",
    "train.unguided_every",
)
"""Keys, and sections as a whole, that say how long, how often, how fast, on how many devices or with how much memory.

Every other key decides what the saved weights, moments, multipliers and counters mean. `sft` belongs to another command.
"""


class Change(NamedTuple):
    """A key with two values, as texts; `not set` where a config does not have it."""

    key: str
    old: str
    new: str


def changes(stored: Mapping[str, Any], config: Config, where: object) -> Iterator[Change]:
    """What differs between a stored config, which may be of a version without some of the keys, and another one.

    Args:
      where: that `stored` comes from, for messages.

    Raises:
      UserError: the stored config is none of this version.
    """
    before = dict(leaves(from_mapping(stored, source=f"the config stored in {where}").model_dump(mode="json")))
    after = dict(leaves(config.model_dump(mode="json")))
    for key in before | after:
        old, new = (_shown(values, key) for values in (before, after))
        if old != new:
            yield Change(key, old, new)


def changed_keys(stored: Mapping[str, Any], config: Config, where: object) -> list[str]:
    """Compares a config with the one stored in a checkpoint.

    Returns:
      `key old -> new` of every key that differs and may.

    Raises:
      UserError: a key differs that may not.
    """
    allowed = []
    for key, old, new in changes(stored, config, where):
        if not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE):
            raise UserError(
                f"{key} is {new}, but the checkpoint in {where} was made with {old} and cannot go on with another one; "
                f"restore {key}, or start a new run with another --out"
            )
        allowed.append(f"{key} {old} -> {new}")
    return allowed


def remove_later(directory: Path, step: int) -> None:
    """Removes the answers of steps after `step`, which the run repeats, and files that a kill left unfinished."""
    rollouts = directory / "rollouts"
    later = [path for path in rollouts.glob("step_*.jsonl") if int(path.stem.removeprefix("step_")) > step]
    for path in [*later, *directory.glob(".*.tmp"), *rollouts.glob(".*.tmp")]:
        path.unlink()


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
