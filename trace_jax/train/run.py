"""A training run in its directory: start or resume, then step, record, save."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trace_jax.config import Config
from trace_jax.errors import UserError
from trace_jax.rollout.storage import json_rows
from trace_jax.tasks import Task
from trace_jax.terminal import say
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.clock import Clock
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.read_checkpoint import policy_from_meta, read_meta, restore_channels
from trace_jax.train.resume import changed_keys
from trace_jax.train.rl import Learner, evaluate, make_learner, rl_step
from trace_jax.train.run_folder import Ended, OpenRun, Report, open_run
from trace_jax.train.setup import build_setup, calibrated, compensated, initial_policy, require_finite, training_mesh
from trace_jax.train.state import initial_state


@dataclass(frozen=True)
class Shared:
    """What a run need not make itself, because another run from the same checkpoint has made it.

    Args:
      task: of the config's `task` and `seed`; None loads it.
      first_evaluation: the evaluation before training, under `eval/<split>/...`; None makes it.
    """

    task: Task | None = None
    first_evaluation: Mapping[str, Any] | None = None


def run_training(
    config: Config, directory: Path, *, resume: bool = False, report: Report | None = None, shared: Shared | None = None
) -> Ended:
    """Trains until `config.steps`, or until a signal asks to stop.

    Args:
      config: checked for training.
      directory: a new or empty directory, or one to resume.
      resume: continue from the last complete checkpoint.
      report: called after every step.
      shared: what other runs have made already.

    Returns:
      The metrics of the last step that ran (empty when there was nothing left to do), and whether a signal stopped the run.
    """
    metrics: dict[str, Any] = {}
    shared = shared or Shared()
    with open_run(config, directory, resume=resume, report=report) as run:
        last = run.latest() if resume else None
        learner = _started(config, directory, shared.task) if last is None else _resumed(config, run.checkpoints, last, shared.task)
        with closing(learner.setup.task), closing(learner):  # the learner first: its stream may still be verifying answers
            learner.setup.require_rows()
            if not run.stopping():
                run.begin(learner.progress.step if resume else None)
                metrics = _loop(learner, run, shared.first_evaluation)
    return Ended(metrics, run.stop.asked)


def _loop(learner: Learner, run: OpenRun, first: Mapping[str, Any] | None) -> dict[str, Any]:
    config, clock = run.config, Clock()
    metrics: dict[str, Any] = {}
    if learner.progress.step == 0:
        if config.eval.every:
            first = evaluate(learner) if first is None else first
            clock.lap("evaluate")
            run.record(0, {**first} | {"time/evaluate": clock.laps["evaluate"]})
            clock = Clock()
        _save(run.checkpoints, learner)
        clock.lap("checkpoint")
    while learner.progress.step < config.steps and not run.stopping():
        metrics, trajectories = rl_step(learner, clock)
        step = learner.progress.step
        if config.eval.every and (step % config.eval.every == 0 or step == config.steps):
            metrics |= evaluate(learner)
            clock.lap("evaluate")
        run.write_rollouts(step, json_rows(trajectories, learner.setup.tokenizer))
        metrics |= clock.metrics()
        run.record(step, metrics)
        # A row is written before its checkpoint, so that no kill leaves a step without one; the save counts to the next row.
        clock = Clock()
        if step % config.checkpoint.every == 0:
            _save(run.checkpoints, learner)
            clock.lap("checkpoint")
    _save(run.checkpoints, learner)
    return metrics


def _started(config: Config, directory: Path, task: Task | None) -> Learner:
    setup, params, multipliers = initial_policy(config, task)
    setup = replace(setup, directory=directory)
    if not multipliers:
        multipliers = calibrated(setup, params)
    setup = compensated(setup, params, multipliers)
    state = initial_state(params, make_optimizer(config.optimizer), multipliers)
    return make_learner(setup, state, Progress(seed=config.seed), setup.engine())


def _resumed(config: Config, checkpoints: Checkpoints, step: int, task: Task | None = None) -> Learner:
    folder = checkpoints.directory / str(step)
    meta = read_meta(folder)
    changes = changed_keys(meta["config"], config, folder)
    stored = policy_from_meta(meta)
    mesh = training_mesh(config, stored.family, stored.config)
    policy, state, progress = checkpoints.restore(step, make_optimizer(config.optimizer), mesh)
    if progress.step and not progress.samples:
        raise UserError(
            f"{folder} was made by sft, and an RL run cannot go on from its optimizer; leave --resume out, choose another --out "
            f"and set model.source={checkpoints.directory.parent}"
        )
    require_finite(state.params, folder)
    setup = build_setup(config, (policy.family, policy.config), task)
    setup = replace(setup, directory=checkpoints.directory.parent, channels=restore_channels(meta))
    setup = compensated(setup, state.params, state.multipliers)
    learner = make_learner(setup, state, progress, setup.engine(), checkpoints.restore_served(step, mesh))
    say(f"resumed after step {step}" + (f" with {', '.join(changes)}" if changes else ""))
    return learner


def _save(checkpoints: Checkpoints, learner: Learner) -> None:
    setup = learner.setup
    stored = setup.config.model_dump(mode="json")
    # What draws the next tokens of an asynchronous run is not repeated anyway, so it goes on with its newest weights.
    served = learner.served if learner.stream is None else None
    checkpoints.save(learner.state, learner.progress, setup.policy, setup.config.tokenizer, stored, served, setup.channels)
