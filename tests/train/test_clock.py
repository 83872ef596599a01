"""Where the time of a step goes: measured apart, in the row it belongs to."""

from __future__ import annotations

import pytest

from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.checkpoint import Checkpoints
from trace_jax.train.clock import PARTS, Clock
from trace_jax.train.run import run_training


def test_laps_add_up_and_what_does_not_happen_takes_no_time():
    clock = Clock(iter([0.0, 2.0, 3.0, 7.0, 10.0]).__next__)
    for part in ("rollout", "train", "rollout"):
        clock.lap(part)
    rest = dict.fromkeys([f"time/{part}" for part in PARTS], 0.0)
    assert clock.metrics() == rest | {"time/rollout": 6.0, "time/train": 1.0, "time/step": 10.0}


@pytest.mark.slow
def test_saves_and_evaluations_are_timed(make_config, cold_start, tmp_path, monkeypatch):
    """A save is in the row after its step, an evaluation in that of its step; both are part of the step."""
    save = Checkpoints.save

    def slow(self, *arguments, **settings):
        import time

        time.sleep(0.3)
        save(self, *arguments, **settings)

    monkeypatch.setattr(Checkpoints, "save", slow)
    run_training(make_config(f"model.source={cold_start.directory}", "eval.every=3", "checkpoint.every=2", "steps=4"), tmp_path)
    first, *rows = read_metrics(tmp_path)
    assert first["time/evaluate"] > 0 and "time/step" not in first
    assert [row["time/checkpoint"] > 0.3 for row in rows] == [True, False, True, False]
    assert [row["time/checkpoint"] > 0 for row in rows] == [True, False, True, False]
    assert [row["time/evaluate"] > 0 for row in rows] == [False, False, True, True]
    for row in rows:
        parts = sum(row[f"time/{part}"] for part in PARTS)
        assert parts == pytest.approx(row["time/step"], rel=0.5) and parts <= row["time/step"]
