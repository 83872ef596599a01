"""Several sequences a row train as one sequence a row: per token, loss, gradient and every figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.metrics.weighted import finalize
from trace_jax.rl.aggregation import Aggregation
from trace_jax.rl.corrections import Correction
from trace_jax.rl.losses import PolicyLoss
from trace_jax.rollout import Trajectories
from trace_jax.rollout.micro_batches import MicroBatch
from trace_jax.rollout.padding import PaddedBatch
from trace_jax.train.batches import TrainBatch, make_batch
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs
from trace_jax.train.update import UpdateSettings, measure

PLAN = tiny.PLANS["nvfp4"]
SPEC = ObjectiveSpec(tiny.policy("float32"), tiny.guided(PLAN))
LENGTH = 32
LIMITS = (1, 14, 3, 9, 5, 14, 2, 7)
TEMPERATURES = (0.7, 1.0, 1.3, 0.0, 0.9)


@dataclass(frozen=True)
class OneSequenceARow(UpdateSettings):
    """The plan without packing, in two micro-batches."""

    def plan(self, lengths, row_multiple=1):
        indices = np.arange(lengths.size)
        return [MicroBatch([[int(i)] for i in part], LENGTH, 16) for part in np.array_split(indices, 2)]


class Case(NamedTuple):
    trajectories: Trajectories
    advantages: np.ndarray
    logp_old: np.ndarray


@pytest.fixture(scope="module")
def case():
    """17 sequences of mixed temperature and 1 to 26 tokens; the first, of a single token, was aborted."""
    engine = tiny.engine(PLAN, "float32", kind="mantissa", max_batch=None)
    requests = [
        replace(request, max_new_tokens=LIMITS[i % 8], temperature=TEMPERATURES[i % 5]) for i, request in enumerate(tiny.requests(16))
    ]
    requests[0] = replace(requests[0], tokens=requests[0].tokens[:1])  # two tokens with its answer
    engine.submit([*requests, replace(requests[0], sample_id=99)])
    engine.abort([99])
    trajectories = engine.poll()
    assert trajectories.lengths()[:2].tolist() == [1, 2]
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.3, trajectories.num_tokens)
    logp_old = np.where(trajectories.sampled, trajectories.logprobs + noise, 0).astype(np.float32)
    return Case(trajectories, rng.normal(size=17).astype(np.float32), logp_old)


def measured(case: Case, kind: type[UpdateSettings], spec: ObjectiveSpec = SPEC, aggregation: Aggregation = "token_mean"):
    settings = kind(spec, micro_batch_tokens=6 * LENGTH, max_length=LENGTH, aggregation=aggregation)
    assert len(settings.plan(case.trajectories.lengths())) == 2
    arguments = {"advantages": case.advantages, "logp_old": case.logp_old, "measure_unguided": True}
    return measure(tiny.params(), tiny.multipliers(), case.trajectories, settings, **arguments)


WHOLE_SEQUENCES = replace(
    SPEC, loss=PolicyLoss(ratio_level="geometric", clip_low=0.1, clip_high=0.1), correction=Correction("icepop", "geometric", 1.3, 0.7)
)
"""A ratio, a weight and, with the mean of means, a divisor for each sequence."""


@pytest.mark.parametrize(
    ("spec", "aggregation"), [(SPEC, "token_mean"), pytest.param(WHOLE_SEQUENCES, "seq_mean_token_mean", marks=pytest.mark.slow)]
)
def test_route_10_logp_08_len_04_packed_updates_equal_unpacked_ones(case, spec, aggregation):
    packed, plain = measured(case, UpdateSettings, spec, aggregation), measured(case, OneSequenceARow, spec, aggregation)
    np.testing.assert_allclose(packed.logp, plain.logp, atol=1e-5)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(plain.gradient))
    assert scale > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), packed.gradient, plain.gradient)
    losses = [float(np.sum(measurement.stats.pop("loss").sum)) for measurement in (packed, plain)]  # pyright: ignore
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and abs(losses[0]) > 1e-3
    figures, expected = finalize(packed.stats), finalize(plain.stats)
    assert {"rollout_corr/log_ppl_abs_diff", "unguided/rollout_corr/log_ppl_abs_diff", "router/agreement"} <= figures.keys()
    assert figures == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < figures["policy/clip_fraction"] < 1


@jax.jit
def run(params, multipliers, batch: TrainBatch):
    """Log-probs `[B, T]`, routes, and the values of the guided sites after rounding, by layer."""
    logp, entropy, output = batch_logprobs(params, multipliers, batch, SPEC)
    options = SPEC.policy.options(SPEC.plan, observe="values")
    observed = SPEC.policy.forward(params, batch.inputs(multipliers), options).observed
    rounded = {name: jnp.moveaxis(values.after, 0, 2) for name, values in observed.items()}
    return {"logp": logp, "entropy": entropy}, {"used": output.routes, "own": output.own_routes, **rounded}


def by_token(batch: TrainBatch, padded: PaddedBatch):
    close, exact = run(tiny.params(), tiny.multipliers(), batch)
    order = np.argsort(padded.sequence_indices)

    def ragged(values):
        parts = np.split(padded.gather(values), np.cumsum(padded.lengths)[:-1])
        return np.concatenate([parts[i] for i in order])

    return jax.tree.map(ragged, jax.device_get(close)), jax.tree.map(ragged, jax.device_get(exact))


def test_logp_08_tokens_of_a_packed_row_do_not_see_their_neighbours(case):
    """Log-probs within 1e-5, codes and routes exact, temperatures mixed in a row; without segments nothing of this holds."""
    settings = UpdateSettings(SPEC, micro_batch_tokens=64 * LENGTH, max_length=LENGTH)
    (micro,) = settings.plan(case.trajectories.lengths())
    packed = make_batch(case.trajectories, micro.bins, LENGTH, 32, num_layers=tiny.CONFIG.num_layers)
    assert max(len(members) for members in micro.bins) > 2
    plain = make_batch(case.trajectories, [[i] for i in range(17)], LENGTH, 32, num_layers=tiny.CONFIG.num_layers)
    close, exact = by_token(*packed)
    expected_close, expected_exact = by_token(*plain)
    for name, values in expected_close.items():
        np.testing.assert_allclose(close[name], values, atol=1e-5, err_msg=name)
    known = case.trajectories.routes.routes_valid  # pyright: ignore[reportOptionalMemberAccess]  (this engine returns routes)
    assert set(exact) == {"used", "own", "expert_input", "k", "v"}
    for name, values in expected_exact.items():
        np.testing.assert_array_equal(exact[name][known], values[known], err_msg=name)

    batch, padded = packed
    blind = by_token(replace(batch, segment_ids=(batch.segment_ids > 0).astype(jnp.int32)), padded)[0]["logp"]
    wrong = np.abs(blind - expected_close["logp"])[case.trajectories.sampled]
    assert np.mean(wrong > 1e-3) > 0.5 and wrong.max() > 0.5
