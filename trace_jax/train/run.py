"""A training run in its directory: start or resume, loop, save, stop cleanly."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trace_jax.config import Config, dump
from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.metrics.writers import MetricsLog, open_writers
from trace_jax.rollout.storage import json_rows, write_jsonl
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.read_checkpoint import read_meta
from trace_jax.train.resume import changed_keys, remove_later
from trace_jax.train.rl import Learner, evaluate, make_learner, rl_step
from trace_jax.train.run_folder import claimed
from trace_jax.train.setup import build_setup, calibrated, initial_policy, require_finite
from trace_jax.train.state import TrainState

Report = Callable[[int, dict[str, Any]], None]
"""Called after each step with its number and metrics."""


@dataclass
class StopRequest:
    """Set by SIGTERM or SIGINT; the loop stops after the step in progress."""

    asked: bool = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a stop after the current step; the former handlers come back at the end."""
    request = StopRequest()

    def handler(signum: int, frame: Any) -> None:
        request.asked = True

    former = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, old in former.items():
            signal.signal(number, old)


def say(line: str) -> None:
    """Tells the person at the console something about the run; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


def run_training(config: Config, directory: Path, *, resume: bool = False, report: Report | None = None) -> dict[str, Any]:
    """Trains until `config.steps`, or until a signal asks to stop.

    Args:
      config: checked for training.
      directory: a new or empty directory, or one to resume.
      resume: continue from the last complete checkpoint.
      report: called after every step.

    Returns:
      The metrics of the last step that ran (empty when there was nothing left to do).
    """
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
    with stop_on_signal() as stop:
        with claimed(directory, resume=resume), closing(checkpoints):
            metrics = _run(config, directory, checkpoints, stop, resume, report or (lambda step, metrics: None))
        if stop.asked:
            last = checkpoints.latest()
            say("stopped before anything was written" if last is None else f"stopped; step {last} is saved, go on with --resume")
    return metrics


def _run(config: Config, directory: Path, checkpoints: Checkpoints, stop: StopRequest, resume: bool, report: Report) -> dict[str, Any]:
    last = checkpoints.latest() if resume else None
    learner = _started(config) if last is None else _resumed(config, checkpoints, last)
    with closing(learner.engine), closing(learner.setup.task):
        for split in ("train", config.eval.split):
            learner.setup.task.rows(split)  # an empty one is refused before anything is written
        if stop.asked:
            return {}
        if resume:
            checkpoints.remove_unfinished()
            remove_later(directory, learner.progress.step)
        write_atomic(directory / "config.yaml", [dump(config).encode()])
        (directory / "rollouts").mkdir(exist_ok=True)
        # Step 0 is evaluated again when a run resumes from it, so its row goes too.
        after = learner.progress.step or -1 if resume else None
        with closing(open_writers(directory, list(config.loggers), after_step=after)) as log:
            metrics = _loop(learner, directory, checkpoints, log, stop, report)
    checkpoints.wait()
    return metrics


def _loop(
    learner: Learner, directory: Path, checkpoints: Checkpoints, log: MetricsLog, stop: StopRequest, report: Report
) -> dict[str, Any]:
    config = learner.setup.config
    metrics: dict[str, Any] = {}
    if learner.progress.step == 0:
        first = evaluate(learner)
        log.write(0, first)
        report(0, first)
        _save(checkpoints, learner)
    while learner.progress.step < config.steps and not stop.asked:
        metrics, trajectories = rl_step(learner)
        step = learner.progress.step
        write_jsonl(directory / "rollouts" / f"step_{step:06d}.jsonl", json_rows(trajectories, learner.setup.tokenizer))
        if config.eval.every and (step % config.eval.every == 0 or step == config.steps):
            metrics |= evaluate(learner)
        log.write(step, metrics)
        report(step, metrics)
        if step % config.checkpoint.every == 0:
            _save(checkpoints, learner)
    _save(checkpoints, learner)
    return metrics


def _started(config: Config) -> Learner:
    setup, params, multipliers = initial_policy(config)
    if not multipliers:
        multipliers = calibrated(setup, params)
    state = TrainState(params, jax.jit(make_optimizer(config.optimizer).init)(params), multipliers)
    return make_learner(setup, state, Progress(seed=config.seed), setup.engine())


def _resumed(config: Config, checkpoints: Checkpoints, step: int) -> Learner:
    folder = checkpoints.directory / str(step)
    changes = changed_keys(read_meta(folder)["config"], config, folder)
    policy, state, progress = checkpoints.restore(step, make_optimizer(config.optimizer))
    if progress.step and not progress.samples:
        raise UserError(
            f"{folder} was made by sft, and an RL run cannot go on from its optimizer; leave --resume out, choose another --out "
            f"and set model.source={checkpoints.directory.parent}"
        )
    require_finite(state.params, folder)
    setup = build_setup(config, (policy.family, policy.config))
    learner = make_learner(setup, state, progress, setup.engine())
    say(f"resumed after step {step}" + (f" with {', '.join(changes)}" if changes else ""))
    return learner


def _save(checkpoints: Checkpoints, learner: Learner) -> None:
    # A resumed engine starts from the saved weights; with `sync.every` above 1 the running one must do so too.
    if learner.synced != learner.progress.version:
        learner.sync()
    setup = learner.setup
    checkpoints.save(learner.state, learner.progress, setup.policy, setup.config.tokenizer, setup.config.model_dump(mode="json"))
