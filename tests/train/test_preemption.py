"""SIGTERM in every phase of a step: the step is finished and saved, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.selection import slow_but
from tests.train.invariants import MODES, content, violations
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.tasks import Task
from trace_jax.train import rl
from trace_jax.train.checkpoint import Checkpoints
from trace_jax.train.run import run_training

STEPS = 4

PHASES = {
    "rollout": (EmbeddedEngine, "poll"),
    "reward": (Task, "score_batch"),
    "update": (rl, "update_policy"),
    "sync": (EmbeddedEngine, "update_weights"),
    "eval": (rl, "measure_pass_rate"),
    "checkpoint": (Checkpoints, "save"),
}
"""Where each phase happens."""


@contextmanager
def signal_inside(phase: str, call: int) -> Iterator[list[int]]:
    """A real SIGTERM to this process at the given call of a phase's function, which then goes on; counts the calls."""
    owner, name = PHASES[phase]
    real, calls = getattr(owner, name), []

    def hit(*arguments, **settings):
        calls.append(len(calls) + 1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, hit)
        yield calls


@pytest.fixture(scope="module")
def config(make_config, cold_start):
    def made(mode: str):
        return make_config(f"model.source={cold_start.directory}", "checkpoint.every=2", f"steps={STEPS}", *MODES[mode])

    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, config):
    directory = tmp_path_factory.mktemp("undisturbed")
    run_training(config("alternating"), directory)
    return content(directory)


@pytest.mark.parametrize("mode", slow_but(["alternating"], MODES))
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_every_phase_loses_nothing(config, undisturbed, tmp_path, phase, mode):
    settings = config(mode)
    with signal_inside(phase, call=2) as calls:
        ended = run_training(settings, tmp_path)
    assert ended.stopped and len(calls) >= 2
    last = read_metrics(tmp_path)[-1]["step"]
    assert last < STEPS and (tmp_path / "checkpoints" / str(last)).is_dir() and violations(tmp_path) == []
    assert not run_training(settings, tmp_path, resume=True).stopped
    assert read_metrics(tmp_path)[-1]["step"] == STEPS and violations(tmp_path) == []
    if mode == "alternating":
        assert content(tmp_path) == undisturbed
