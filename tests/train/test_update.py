"""One update: what it may depend on (the batch) and what not (micro-batches, padding, order)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import Config
from trace_jax.errors import UserError
from trace_jax.metrics.weighted import WeightedMetric, combine, finalize
from trace_jax.quantization.weights import with_rounded_experts
from trace_jax.rl.advantages import group_advantages
from trace_jax.train import rl, update
from trace_jax.train.batches import make_batch
from trace_jax.train.checkpoint import Progress
from trace_jax.train.clock import Clock
from trace_jax.train.objective import _parity, objective_and_gradient
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.rl import Learner, make_learner, rl_step
from trace_jax.train.setup import initial_policy
from trace_jax.train.state import TrainState
from trace_jax.train.update import _pooled, measure, update_policy


def learner_of(config: Config) -> Learner:
    setup, params, multipliers = initial_policy(config)
    state = TrainState(params, make_optimizer(config.optimizer).init(params), multipliers)
    return make_learner(setup, state, Progress(seed=config.seed), setup.engine())


@pytest.fixture(scope="module")
def overrides(cold_start):
    return (f"model.source={cold_start.directory}",)


@pytest.fixture(scope="module")
def learner(make_config, overrides):
    return learner_of(make_config(*overrides))


@pytest.fixture(scope="module")
def batch(make_config, overrides):
    """Scored trajectories of the learner's weights and their advantages; from another learner, which the step changes."""
    _, trajectories = rl_step(learner_of(make_config(*overrides)), Clock())
    rng = np.random.default_rng(0)
    rewards = rng.random(trajectories.num_sequences).astype(np.float32)
    return trajectories, group_advantages(rewards, trajectories.group)


@pytest.fixture
def run(learner, batch):
    """`run(...)` measures the batch with changed settings or arguments."""

    def call(trajectories=batch[0], advantages=batch[1], *, unguided=False, sequences=None, **settings):
        changed = dataclasses.replace(learner.settings, **settings)
        state = learner.state
        return measure(
            state.params, state.multipliers, trajectories, changed, advantages=advantages, sequences=sequences, measure_unguided=unguided
        )

    return call


def loss_of(measured) -> float:
    return float(np.sum(measured.stats["loss"].sum))


def assert_same_gradient(first, second):
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(second))
    assert scale > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), first, second)


def assert_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("tokens", [16, 128])
def test_len_01_03_04_any_micro_batch_size(run, tokens):
    whole, parts = run(), run(micro_batch_tokens=tokens)
    assert loss_of(parts) == pytest.approx(loss_of(whole), rel=1e-5, abs=1e-7)
    assert_same_gradient(parts.gradient, whole.gradient)
    np.testing.assert_allclose(parts.logp, whole.logp, atol=1e-5)


def test_len_02_statistics_do_not_depend_on_the_split(run):
    whole, parts = finalize(run().stats), finalize(run(micro_batch_tokens=16).stats)
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        if name != "loss":
            assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_len_07_wider_padding(run):
    assert_same_gradient(run(max_length=48).gradient, run().gradient)


def test_len_04_adv_05_order_of_sequences(run, batch):
    trajectories, advantages = batch
    order = np.random.default_rng(1).permutation(trajectories.num_sequences)
    shuffled, whole = run(trajectories.select(order), advantages[order]), run()
    assert loss_of(shuffled) == pytest.approx(loss_of(whole), rel=1e-5, abs=1e-7)
    assert_same_gradient(shuffled.gradient, whole.gradient)


def test_len_06_padded_rows_change_nothing(learner, batch):
    trajectories, advantages = batch
    results = []
    for rows in (4, 8):
        padded, _ = make_batch(trajectories, [[0], [5], [6]], 16, rows, num_layers=2, advantages=advantages)
        state, spec = learner.state, learner.settings.spec
        results.append(objective_and_gradient(state.params, state.multipliers, padded, jnp.float32(20), spec=spec))
    (first, first_logp, first_stats), (second, second_logp, second_stats) = results
    assert_same_gradient(second, first)
    np.testing.assert_allclose(second_logp[:3], first_logp[:3], atol=1e-5)
    counts = {name: metric.count for name, metric in first_stats.items() if hasattr(metric, "count")}
    assert_equal(counts, {name: second_stats[name].count for name in counts})


def test_experts_are_rounded_once_for_all_micro_batches(learner, run, batch, monkeypatch):
    """And the result is that of a forward that rounds them itself, which is what the masters' straight-through gradient is defined by."""
    trajectories, advantages = batch
    calls = []
    monkeypatch.setattr(update, "with_rounded_experts", lambda *a, **k: calls.append(k["fmt"]) or with_rounded_experts(*a, **k))
    settings = replace(learner.settings, micro_batch_tokens=16)
    measured = run(micro_batch_tokens=16)
    assert calls == ["nvfp4"] and len(settings.plan(trajectories.lengths())) > 1
    whole, _ = make_batch(trajectories, [[i] for i in range(trajectories.num_sequences)], 16, 8, num_layers=2, advantages=advantages)
    state, spec = learner.state, learner.settings.spec
    assert spec.plan.weights == "nvfp4"
    total = jnp.float32(int(trajectories.sampled_lengths().sum()))
    gradient, _, _ = objective_and_gradient(state.params, state.multipliers, whole, total, spec=spec)
    assert_same_gradient(measured.gradient, gradient)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(measured.gradient))


def test_adv_02_zero_variance_groups_give_exactly_zero(run, batch):
    trajectories, advantages = batch
    rewards = np.where(trajectories.group == trajectories.group[0], np.float32(0.1), advantages)
    mixed = group_advantages(rewards, trajectories.group)
    constant = np.flatnonzero(trajectories.group == trajectories.group[0])
    measured = run(advantages=mixed, sequences=constant)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(measured.gradient))
    assert loss_of(measured) == 0
    everything = run(advantages=np.zeros_like(advantages))
    assert loss_of(everything) == 0 and all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(everything.gradient))
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(run(advantages=mixed).gradient))


def test_logp_09_10_passes_repeat_and_leave_no_arrays(run):
    first = run(micro_batch_tokens=16)  # several parts: sums donate their first buffer
    live = []
    for _ in range(6):
        again = run(micro_batch_tokens=16)
        assert_equal(again.gradient, first.gradient)
        del again
        live.append(len(jax.live_arrays()))
    assert len(set(live[1:])) == 1, live
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first.gradient))


def programs() -> int:
    """Programs compiled for the objective so far."""
    return objective_and_gradient._cache_size()  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs of jax)


def test_unguided_figures_come_from_the_same_program(run):
    run()
    before = programs()
    metrics = finalize(run(unguided=True).stats)
    assert programs() == before
    assert metrics["unguided/rollout_corr/k3_kl"] >= metrics["rollout_corr/k3_kl"] - 1e-9
    assert metrics["guidance/parity_agreement"] > 0.9 and metrics["router/agreement"] > 0.9


def test_parity_is_a_share_also_where_int32_cannot_count_the_values():
    """Two sites of three layers with 1.5e9 values each: 9e9 in all. Half of them agree."""
    layers = jnp.full(3, 1.5e9, jnp.float32)
    part = jax.jit(_parity)({"expert_input": (layers / 2, layers), "k": (layers / 2, layers)})
    pooled = _pooled(combine([part, part]))["guidance/parity_agreement"]
    assert (
        isinstance(pooled, WeightedMetric)
        and pooled.count == 18_000_000_000
        and finalize({"agreement": pooled})["agreement"] == pytest.approx(0.5, rel=1e-6)
    )


def test_guided_rounding_is_straight_through(run):
    """K and V reach the loss through their guided sites alone: without straight-through their gradient is exactly zero."""
    guided = run().gradient
    for name in ("k", "v"):
        leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(guided["groups"]) if f"{name}_proj" in str(path)]
        assert leaves, f"no {name}_proj in the tree"
        assert all(np.linalg.norm(np.asarray(leaf[1])) > 0 for leaf in leaves)


@pytest.mark.parametrize("absent", ["no routes", "no valid row"])
def test_route_09_replay_of_nothing_is_refused(run, batch, absent):
    trajectories, _ = batch
    routes = None if absent == "no routes" else replace(trajectories.routes, routes_valid=np.zeros(trajectories.num_tokens, bool))
    with pytest.raises(UserError, match="routing_replay"):
        run(trajectories.replace(routes=routes))


def test_no_sequences(run):
    with pytest.raises(ValueError, match="no sequences"):
        run(sequences=np.zeros(0, np.int64))


def spy_on_measure(monkeypatch, change=lambda measured: measured):
    """Records the calls of `measure` that a step makes; the real one runs."""
    calls = []

    def recorded(params, multipliers, trajectories, settings, **arguments):
        measured = measure(params, multipliers, trajectories, settings, **arguments)
        calls.append((params, arguments, measured))
        return change(measured)

    monkeypatch.setattr(rl, "measure", recorded)
    return calls


def test_two_updates_share_the_old_log_probabilities_of_the_first(make_config, overrides, monkeypatch):
    learner = learner_of(make_config(*overrides, "train.updates_per_batch=2", "sync.max_staleness=1"))
    start = learner.state.params
    calls = spy_on_measure(monkeypatch)
    metrics, trajectories = rl_step(learner, Clock())
    assert len(calls) == 3
    assert calls[0][0] is start and calls[1][0] is start and calls[2][0] is not start
    old = calls[0][2].logp
    for _, arguments, _ in calls[1:]:
        np.testing.assert_array_equal(arguments["logp_old"], old)
    used = np.sort(np.concatenate([arguments["sequences"] for _, arguments, _ in calls[1:]]))
    np.testing.assert_array_equal(used, np.arange(trajectories.num_sequences))
    assert not set(trajectories.group[calls[1][1]["sequences"]]) & set(trajectories.group[calls[2][1]["sequences"]])
    assert learner.progress.version == 2 and metrics["sync/staleness"] == 1


def test_a_gradient_that_is_not_finite_changes_nothing(make_config, overrides, monkeypatch):
    learner = learner_of(make_config(*overrides))
    before = jax.device_get((learner.state.params, learner.state.opt_state))
    bad = lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan)  # noqa: E731
    spy_on_measure(
        monkeypatch, lambda measured: replace(measured, gradient=measured.gradient | {"final_norm": bad(measured.gradient["final_norm"])})
    )
    for skipped in (1, 2):
        metrics, _ = rl_step(learner, Clock())
        assert metrics["train/skipped_updates"] == 1 and learner.progress.skipped_in_a_row == skipped and np.isnan(metrics["grad_norm"])
        assert_equal(jax.device_get((learner.state.params, learner.state.opt_state)), before)
        assert learner.progress.version == 0 and learner.progress.step == skipped
    with pytest.raises(UserError, match="3 gradients in a row were not finite"):
        rl_step(learner, Clock())


def test_the_skipped_updates_of_a_step_are_counted_wherever_they_come(make_config, overrides, monkeypatch):
    """Two updates, the first of them skipped: one was, and the good one that follows it ends the series."""
    learner = learner_of(make_config(*overrides, "train.updates_per_batch=2", "sync.max_staleness=1"))
    factors = iter([1.0, np.nan, 1.0])  # the first measurement is that of the old log-probs

    def spoil(measured):
        factor = next(factors)
        return replace(measured, gradient=jax.tree.map(lambda leaf: leaf * factor, measured.gradient))

    spy_on_measure(monkeypatch, spoil)
    metrics, _ = rl_step(learner, Clock())
    assert metrics["train/skipped_updates"] == 1 and learner.progress.skipped_in_a_row == 0 and learner.progress.version == 1


def test_update_policy_reports_the_norm_before_clipping(run, learner):
    measured = run()
    result = update_policy(learner.state, measured, learner.optimizer)
    expected = np.sqrt(sum(float(jnp.sum(leaf.astype(jnp.float32) ** 2)) for leaf in jax.tree.leaves(measured.gradient)))
    assert result.grad_norm == pytest.approx(expected, rel=1e-5)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result.state.params))


def test_mis_02_03_defaults():
    """Replay and the importance weight are on by default, and there is no auxiliary router loss to switch on."""
    config = Config()
    assert config.algorithm.routing_replay and config.algorithm.correction.kind == "tis" and config.algorithm.correction.cap == 5.0
    assert "aux" not in str(config.model_dump())
