"""Audit of the rounding itself: the trainer's values against the rollout's full codes, per layer and site.

An audited sequence carries every code of every layer. One teacher-forced forward gives the trainer's site values before
and after rounding, and the comparison needs nothing else. Definitions (method note, sections 3.1 and 9):

* `code_agreement`: share of values whose rounded result equals the rollout's.
* `adjacent_share`: among values that rounding to nearest *under the rollout's scale* sends to another code, the share that
  is exactly one code away.
* `outside_bracket_fraction`: share of rollout codes that are neither neighbour of the trainer's value; no record could
  reproduce them.
* `d_act`: Frobenius norm of the difference of the rounded values, relative to the rollout's norm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Float, UInt8

from pallas_kernels import oracle
from pallas_kernels.formats import block_format
from trace_jax.metrics.weighted import Stats, WeightedMetric, finalize
from trace_jax.models.inputs import SiteValues
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.rollout.padding import PaddedSite, pad_batch
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.batches import TrainBatch, make_batch
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.setup import Setup
from trace_jax.train.state import TrainState

PREFIX = "guidance/audit"
MAGNITUDES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


@dataclass(frozen=True)
class SiteComparison:
    """One layer and site: sums and counts of the four figures."""

    code_agreement: WeightedMetric
    adjacent_share: WeightedMetric
    outside_bracket_fraction: WeightedMetric
    d_act: WeightedMetric


def audit_metrics(setup: Setup, state: TrainState, trajectories: Trajectories) -> dict[str, float]:
    """The figures of a batch's audited sequences under the names `guidance/audit/<figure>/<site>/layer_<id>`."""
    if trajectories.audit is None:
        return {}
    audited = trajectories.select(trajectories.audit.sequences)
    comparisons = compare_sites(setup.objective, state.params, state.multipliers, audited, replay=setup.config.algorithm.routing_replay)
    stats: Stats = {}
    for (site, layer), result in comparisons.items():
        for figure in ("code_agreement", "adjacent_share", "outside_bracket_fraction", "d_act"):
            stats[f"{PREFIX}/{figure}/{site}/layer_{layer}"] = getattr(result, figure)
    return finalize(stats)


def compare_sites(
    spec: ObjectiveSpec,
    params: Params,
    multipliers: Multipliers,
    audited: Trajectories,
    *,
    replay: bool = True,
    max_length: int | None = None,
) -> dict[tuple[str, int], SiteComparison]:
    """Compares the trainer's forward under `spec.plan` with the rollout's codes.

    Args:
      audited: sequences that all have an audit record.
      replay: whether routes are replayed.
      max_length: no sequence is longer; batches that share it share one compiled forward. None takes the longest here.

    Returns:
      One comparison per (site, global layer id) of the audit record.
    """
    assert audited.audit is not None  # the caller selected audited sequences
    length = -(-(max_length or int(audited.lengths().max())) // 16) * 16
    everything = list(range(audited.num_sequences))
    num_layers = spec.policy.config.num_layers
    batch, _ = make_batch(audited, [[index] for index in everything], length, len(everything), num_layers=num_layers, replay=replay)
    observed = jax.device_get(_observe(params, multipliers, batch, spec=spec))
    full = pad_batch(audited.replace(guidance=audited.audit.record), everything, length).guidance
    assert full is not None  # just put there
    results = {}
    for name, record in full.sites.items():
        values: SiteValues = observed[name]
        for slot, layer in enumerate(record.layer_ids.tolist()):
            results[name, layer] = _compare(_layer(values, layer), record, slot, full.valid)
    return results


@functools.partial(jax.jit, static_argnames=("spec",))
def _observe(params: Params, multipliers: Multipliers, batch: TrainBatch, *, spec: ObjectiveSpec) -> dict[str, SiteValues]:
    options = spec.policy.options(spec.plan, observe="values")
    return spec.policy.forward(params, batch.inputs(multipliers), options).observed


def _layer(values: SiteValues, layer: int) -> SiteValues:
    return SiteValues(np.asarray(values.before[layer], np.float32), np.asarray(values.after[layer], np.float32))


def _compare(values: SiteValues, record: PaddedSite, slot: int, valid: Bool[np.ndarray, "B T"]) -> SiteComparison:
    assert record.data is not None  # an audit holds codes
    codes = oracle.unpack_codes(record.data[slot], record.size)[valid]
    scale = _scales(record, slot, valid)
    before, after = values.before[valid].astype(np.float64), values.after[valid].astype(np.float64)
    rollout = np.where(codes & 8, -1.0, 1.0) * MAGNITUDES[codes & 7] * scale
    z = np.divide(before, scale, out=np.zeros_like(before), where=scale > 0)
    magnitude, sign = np.minimum(np.abs(z), 6.0), np.where(z < 0, -1, 1)
    lower = np.minimum(np.searchsorted(MAGNITUDES, magnitude, side="right") - 1, 6)
    nearest = lower + (magnitude > (MAGNITUDES[lower] + MAGNITUDES[lower + 1]) / 2)
    place, place_rollout = sign * nearest, np.where(codes & 8, -1, 1) * (codes & 7).astype(int)
    apart = np.abs(place - place_rollout)
    same_side = (place_rollout == 0) | (np.sign(place_rollout) == sign)
    index = np.abs(place_rollout)
    inside = same_side & ((index == lower) | (index == lower + 1))
    return SiteComparison(
        code_agreement=WeightedMetric(float(np.sum(after == rollout)), rollout.size),
        adjacent_share=WeightedMetric(float(np.sum(apart == 1)), int(np.sum(apart > 0))),
        outside_bracket_fraction=WeightedMetric(float(np.sum(~inside)), rollout.size),
        d_act=WeightedMetric(float(np.linalg.norm(after - rollout) / max(float(np.linalg.norm(rollout)), 1e-30)), 1),
    )


def _scales(record: PaddedSite, slot: int, valid: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "rows *lead d"]:
    """Decode scale of every value: block scale times the power of two of the multiplier."""
    block = block_format(record.format)
    scale_bytes: UInt8[np.ndarray, "rows *lead blocks"] = record.scales[slot][valid]
    decoded = oracle.scale_values(scale_bytes, block).astype(np.float64)
    if record.multiplier is not None:
        multiplier = record.multiplier[slot]
        multiplier = multiplier if multiplier.ndim == 0 else multiplier[valid].reshape(-1, *[1] * (decoded.ndim - 1))
        decoded = decoded * np.exp2(np.floor(np.log2(multiplier)))
    return np.repeat(decoded, record.block, axis=-1)[..., : record.size]
