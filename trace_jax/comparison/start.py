"""The checkpoint that all runs of a comparison begin from: one for all methods and seeds, with its multipliers.

The split of a question follows from its text alone, so the held-out questions of one seed are strange to the cold start of another.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from trace_jax.config import Config
from trace_jax.models.registry import ModelConfig
from trace_jax.tasks import Task
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.read_checkpoint import locate_checkpoint, policy_from_meta, read_meta
from trace_jax.train.run_folder import Report
from trace_jax.train.run_sft import run_sft
from trace_jax.train.setup import calibrated, initial_policy
from trace_jax.train.state import initial_state

COLD_START = "cold-start"
"""Folder of a start that the comparison makes itself."""


def existing_start(config: Config) -> Path | None:
    """The step folder that `model.source` stands for now; None if the start must be made: there is no source, or it has no multipliers.

    Raises:
      UserError: the source is no checkpoint.
    """
    source = config.model.source
    if source is None or (Path(source) / "config.json").is_file():
        return None
    folder = locate_checkpoint(Path(source))
    return folder if read_meta(folder)["sites"] else None


def start_policy(config: Config, start: Path | None, task: Task) -> tuple[str, ModelConfig] | None:
    """Family and shape of the policy at the start, for `build_setup`; None for random weights of the config.

    Args:
      config: that the start is made from, where there is none yet.
      start: from `existing_start`.
      task: of the config.
    """
    if start is not None:
        policy = policy_from_meta(read_meta(start))
    elif config.model.source is not None:
        policy = initial_policy(config, task)[0].policy
    else:
        return None
    return policy.family, policy.config


def make_start(config: Config, out: Path, report: Report) -> Path | None:
    """Makes the start in `out/cold-start`, unless an earlier call has: the config's `sft`, or its `model.source` calibrated.

    It is there when it is complete; what a stopped or killed call had of it is made again.

    Returns:
      Its path, or None if a signal stopped it.
    """
    target, partial = out / COLD_START, out / f".{COLD_START}.partial"
    if target.exists():
        return target
    shutil.rmtree(partial, ignore_errors=True)
    if config.model.source is None:
        if run_sft(config, partial, report).stopped:
            shutil.rmtree(partial, ignore_errors=True)
            return None
    else:
        _calibrate(config, partial)
    partial.rename(target)
    return target


def _calibrate(config: Config, directory: Path) -> None:
    setup, params, _ = initial_policy(config)
    with closing(setup.task):
        state = initial_state(params, make_optimizer(config.optimizer), calibrated(setup, params))
    with closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        checkpoints.save(state, Progress(), setup.policy, config.tokenizer, config.model_dump(mode="json"))
