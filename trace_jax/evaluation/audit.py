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
import math
from dataclasses import astuple, dataclass, replace

import jax
import numpy as np
from jaxtyping import Bool, Float, UInt8

from pallas_kernels import oracle
from pallas_kernels.formats import block_format
from trace_jax.models.inputs import SiteValues
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.rollout.padding import PaddedSite, pack_batch
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.sharding.placement import to_host
from trace_jax.train.batches import TrainBatch, make_batch
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.state import TrainState
from trace_jax.train.update import UpdateSettings

PREFIX = "guidance/audit"
MAGNITUDES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


@dataclass(frozen=True)
class SiteComparison:
    """One layer and site as counts and sums over its values; those of parts of a batch add up.

    Args:
      values: how many were compared.
      equal: the rounded result is the rollout's.
      moved: rounding to nearest under the rollout's scale gives another code.
      adjacent: of the moved ones, those exactly one code away.
      outside: the rollout's code is neither neighbour of the trainer's value.
      squared_difference, squared_rollout: sums of squares of the difference, and of the rollout's values.
    """

    values: int
    equal: int
    moved: int
    adjacent: int
    outside: int
    squared_difference: float
    squared_rollout: float

    def __add__(self, other: SiteComparison) -> SiteComparison:
        """The comparison over the values of both."""
        return SiteComparison(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float]:
        """The four figures by name; a share of nothing is NaN."""
        return {
            "code_agreement": _share(self.equal, self.values),
            "adjacent_share": _share(self.adjacent, self.moved),
            "outside_bracket_fraction": _share(self.outside, self.values),
            "d_act": math.sqrt(self.squared_difference) / max(math.sqrt(self.squared_rollout), 1e-30),
        }


def audit_metrics(settings: UpdateSettings, state: TrainState, trajectories: Trajectories, version: int) -> dict[str, float]:
    """The figures of a batch's audited sequences under the names `guidance/audit/<figure>/<site>/layer_<id>`.

    Records of older weights are also compared by their age, since drift of the weights moves values away from the recorded
    code: `guidance/audit/<figure>/<site>/layer_<id>/gap_<g>`, for every number of updates g where some have one.

    Args:
      version: of the trainer's weights.
    """
    if trajectories.audit is None:
        return {}
    audited = trajectories.select(trajectories.audit.sequences)
    assert audited.audit is not None  # they are the audited ones
    compared = compare_sites(state.params, state.multipliers, audited, settings)
    metrics = {
        f"{PREFIX}/{figure}/{site}/layer_{layer}": value
        for (site, layer), result in compared.items()
        for figure, value in result.figures().items()
    }
    record = audited.audit.record
    gaps = np.unique(version - record.version[record.valid]).tolist()
    for gap in gaps if any(gaps) else []:
        part = replace(record, valid=record.valid & (version - record.version == gap))
        of_gap = audited.replace(audit=replace(audited.audit, record=part))
        for (site, layer), result in compare_sites(state.params, state.multipliers, of_gap, settings).items():
            metrics |= {f"{PREFIX}/{figure}/{site}/layer_{layer}/gap_{gap}": value for figure, value in result.figures().items()}
    return metrics


def compare_sites(
    params: Params, multipliers: Multipliers, audited: Trajectories, settings: UpdateSettings
) -> dict[tuple[str, int], SiteComparison]:
    """Compares the trainer's forward with the rollout's codes, in micro-batches of the shapes that train.

    Args:
      audited: sequences that all have an audit record.

    Returns:
      One comparison per (site, global layer id) of the audit record.
    """
    assert audited.audit is not None  # the caller selected audited sequences
    recorded = audited.replace(guidance=audited.audit.record)
    config = settings.spec.policy.config
    results: dict[tuple[str, int], SiteComparison] = {}
    for micro in settings.plan(audited.lengths()):
        batch, _ = make_batch(audited, micro.bins, micro.length, micro.rows, num_layers=config.num_layers, replay=settings.replay)
        observed = _observe(params, multipliers, batch, spec=settings.spec)
        full = pack_batch(recorded, micro.bins, micro.length, micro.rows).guidance
        assert full is not None  # just put there
        for name, record in full.sites.items():
            values: SiteValues = to_host(observed[name])
            for slot, layer in enumerate(record.layer_ids.tolist()):
                found = _compare(_layer(values, config.layers_of(name).index(layer)), record, slot, full.valid)
                results[name, layer] = results[name, layer] + found if (name, layer) in results else found
    return results


@functools.partial(jax.jit, static_argnames=("spec",))
def _observe(params: Params, multipliers: Multipliers, batch: TrainBatch, *, spec: ObjectiveSpec) -> dict[str, SiteValues]:
    options = spec.policy.options(spec.plan, observe="values")
    return spec.policy.forward(params, batch.inputs(multipliers), options).observed


def _layer(values: SiteValues, place: int) -> SiteValues:
    return SiteValues(np.asarray(values.before[place], np.float32), np.asarray(values.after[place], np.float32))


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
        values=rollout.size,
        equal=int(np.sum(after == rollout)),
        moved=int(np.sum(apart > 0)),
        adjacent=int(np.sum(apart == 1)),
        outside=int(np.sum(~inside)),
        squared_difference=float(np.sum((after - rollout) ** 2)),
        squared_rollout=float(np.sum(rollout**2)),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


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
