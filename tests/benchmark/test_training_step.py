"""The training step's benchmark: valid data, and rows for every method."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from trace_jax.benchmark import training_step
from trace_jax.benchmark.synthetic import synthetic_multipliers, synthetic_trajectories
from trace_jax.train.batches import make_batch

CONFIG = training_step._toy(2).config


def test_data_is_valid_and_reaches_the_trainer():
    trajectories = synthetic_trajectories(CONFIG, 4, 16, "mantissa", (1,))
    trajectories.validate()
    assert trajectories.sampled_lengths().tolist() == [12] * 4
    batch, _ = make_batch(trajectories, [[0], [1], [2], [3]], 16, 4, num_layers=2)
    assert batch.guides is not None and batch.routes is not None
    assert sorted(batch.guides.sites) == ["expert_input", "k", "v"] and int(batch.guides.valid.sum()) == 4 * 15
    for name, site in batch.guides.sites.items():
        assert site.slots.tolist() == [-1, 0] and site.multiplier is not None
        np.testing.assert_array_equal(site.multiplier, synthetic_multipliers(2)[name][1:])
    routes = np.asarray(batch.routes)[:, :15]
    assert routes.min() >= 0 and np.all(routes[..., 0] != routes[..., 1])


def test_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        training_step, "_median_time_us", lambda workload, method, steps: {"bf16": 10.0, "qat": 11.0, "trace": 12.5}[method]
    )
    notes: list[str] = []
    made = training_step.run(layers=3, small=True, note=notes.append)
    assert [(row["op"], row["time_us"], row["peer"], row["ratio"]) for row in made] == [
        ("training_step/bf16", 10.0, None, None),
        ("training_step/qat", 11.0, "bf16", 1.1),
        ("training_step/trace", 12.5, "bf16", 1.25),
    ]
    assert all("3 layers" in row["shape"] and row["target"] is None and row["met"] is None for row in made)  # nothing is judged on a CPU
    assert len(notes) == 3 and "trace" in notes[2]


def test_a_step_on_the_target_device_is_judged_and_its_memory_counted(monkeypatch: pytest.MonkeyPatch):
    class Device:
        device_kind, peaks = "gpu", iter((100, 100, 120))

        def memory_stats(self):
            return {"peak_bytes_in_use": next(self.peaks)}

    monkeypatch.setattr(
        training_step, "_median_time_us", lambda workload, method, steps: {"bf16": 10.0, "qat": 12.0, "trace": 11.0}[method]
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = Device()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    made = {row["op"]: row for row in training_step.run(layers=4)}
    assert made["training_step/trace"]["target"] == "<= 1.10 of the time of bf16" and made["training_step/trace"]["met"] is True
    assert made["training_step/qat"]["met"] is None
    memory = made["training_step/trace/peak_memory"]
    assert (memory["bytes"], memory["ratio"], memory["time_us"]) == (120, 1.2, None)
    assert memory["shape"] == "qwen3-30b-a3b, 4 layers, 8 sequences of 2048"


@pytest.mark.slow
def test_a_step_runs():
    assert training_step._median_time_us(training_step._toy(1), "trace", 1) > 0


def test_a_step_that_was_refused_has_no_time(monkeypatch: pytest.MonkeyPatch):
    class Refused:
        state, grad_norm = None, float("nan")

    monkeypatch.setattr(training_step, "measure", lambda *_, **__: None)
    monkeypatch.setattr(training_step, "update_policy", lambda *_: Refused)
    with pytest.raises(RuntimeError, match="training_step/bf16: the gradient is not finite"):
        training_step._median_time_us(training_step._toy(1), "bf16", 1)
