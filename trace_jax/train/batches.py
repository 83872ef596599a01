"""Packed host batches as the device arrays of a training forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.pytrees import register_arrays
from trace_jax.layers.attention import causal_mask
from trace_jax.models.inputs import ForwardInputs
from trace_jax.quantization.multipliers import KV_SITES, Multipliers
from trace_jax.quantization.sites import GuideBatch, SiteGuide
from trace_jax.rollout.padding import PaddedBatch, PaddedGuidance, pack_batch
from trace_jax.rollout.trajectories import Trajectories, token_rows
from trace_jax.sharding.placement import put_rows


@register_arrays
@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch.

    Args:
      tokens, positions, segment_ids: int32; segment 0 is padding.
      sampled: true where the token was drawn by the policy and enters the loss.
      logp_rollout: float32 log-probability of the token when it was drawn.
      logp_old: the same under the trainer before the update; None takes the current forward's own.
      advantages: float32 per token.
      divisors: float32 per token, what the loss of its sequence is divided by; None where that is 1 for all.
      temperature: float32 per token.
      routes: int32 expert ids, -1 where free; None without replay.
      guides: the rollout's guidance record; None without one.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    sampled: Bool[Array, "B T"]
    logp_rollout: Float[Array, "B T"]
    logp_old: Float[Array, "B T"] | None
    advantages: Float[Array, "B T"]
    divisors: Float[Array, "B T"] | None
    temperature: Float[Array, "B T"]
    routes: Int[Array, "B T Lm k"] | None
    guides: GuideBatch | None

    def inputs(self, multipliers: Multipliers) -> ForwardInputs:
        """The teacher-forced forward of this batch."""
        mask = causal_mask(self.positions, self.segment_ids)
        return ForwardInputs(self.tokens, self.positions, mask, multipliers, self.routes, self.guides)


def make_batch(
    trajectories: Trajectories,
    bins: Sequence[Sequence[int]],
    length: int,
    rows: int,
    *,
    num_layers: int,
    advantages: Float32[np.ndarray, " S"] | None = None,
    divisors: Float32[np.ndarray, " S"] | None = None,
    logp_old: Float32[np.ndarray, " N"] | None = None,
    replay: bool = True,
    mesh: Mesh | None = None,
) -> tuple[TrainBatch, PaddedBatch]:
    """Packs some sequences into one micro-batch.

    Args:
      trajectories: where the sequences come from.
      bins: for each row its sequences.
      length, rows: padded shape.
      num_layers: L of the model.
      advantages: one per sequence of `trajectories`; None for zeros.
      divisors: one per sequence of `trajectories` (`trace_jax.rl.aggregation`); None for ones.
      logp_old: one per token of `trajectories`.
      replay: whether routes are passed on.
      mesh: between whose devices the rows are divided; None for one device.

    Returns:
      Device arrays, and the host batch they were made from.
    """
    packed = pack_batch(trajectories, bins, length, rows)
    chosen = packed.sequence_indices

    put = functools.partial(put_rows, mesh)

    def per_sequence(values: Float32[np.ndarray, " S"], fill: float) -> Float[Array, "B T"]:
        return put(packed.scatter(np.repeat(values[chosen], packed.lengths), fill))

    def per_token(values: Float32[np.ndarray, " N"]) -> Float[Array, "B T"]:
        return put(packed.scatter(values[token_rows(trajectories.offsets[:-1][chosen], packed.lengths)], 0.0))

    batch = TrainBatch(
        tokens=put(packed.tokens),
        positions=put(packed.positions),
        segment_ids=put(packed.segment_ids),
        sampled=put(packed.sampled),
        logp_rollout=put(packed.logprobs),
        logp_old=None if logp_old is None else per_token(logp_old),
        advantages=put(np.zeros(packed.shape, np.float32)) if advantages is None else per_sequence(advantages, 0.0),
        divisors=None if divisors is None else per_sequence(divisors, 1.0),
        temperature=per_sequence(trajectories.temperature, 1.0),
        routes=put(packed.routed_experts) if replay and packed.routed_experts is not None else None,
        guides=None if packed.guidance is None else _guides(packed.guidance, num_layers, mesh),
    )
    return batch, packed


def _guides(guidance: PaddedGuidance, num_layers: int, mesh: Mesh | None) -> GuideBatch:
    sites = {}
    for name, site in guidance.sites.items():
        slots = np.full(num_layers, -1, np.int32)
        slots[site.layer_ids] = np.arange(site.layer_ids.size)
        heads = 3 if name in KV_SITES else None
        data = None if site.data is None else put_rows(mesh, site.data, axis=1, heads=heads)
        scales = put_rows(mesh, site.scales, axis=1, heads=heads)
        multiplier = None
        if site.multiplier is not None:
            multiplier = put_rows(mesh, site.multiplier, axis=1 if site.multiplier.ndim > 1 else None)
        sites[name] = SiteGuide(data, scales, multiplier, put_rows(mesh, slots, axis=None))
    return GuideBatch(sites, put_rows(mesh, guidance.valid), guidance.kind)
