"""Padded host batches as the device arrays of a training forward."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from trace_jax.layers.attention import causal_mask
from trace_jax.models.inputs import ForwardInputs
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.sites import GuideBatch, SiteGuide
from trace_jax.rollout.padding import PaddedBatch, PaddedGuidance, pad_batch
from trace_jax.rollout.trajectories import Trajectories


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch.

    Args:
      tokens, positions, segment_ids: int32; segment 0 is padding.
      sampled: true where the token was drawn by the policy and enters the loss.
      logp_rollout: float32 log-probability of the token when it was drawn.
      logp_old: the same under the trainer before the update; None takes the current forward's own.
      advantages: float32 per token.
      temperature: float32 per row.
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
    temperature: Float[Array, " B"]
    routes: Int[Array, "B T L k"] | None
    guides: GuideBatch | None

    def inputs(self, multipliers: Multipliers) -> ForwardInputs:
        """The teacher-forced forward of this batch."""
        mask = causal_mask(self.positions, self.segment_ids)
        return ForwardInputs(self.tokens, self.positions, mask, multipliers, self.routes, self.guides)


def make_batch(
    trajectories: Trajectories,
    indices: list[int],
    length: int,
    rows: int,
    *,
    num_layers: int,
    advantages: Float32[np.ndarray, " S"] | None = None,
    logp_old: Float32[np.ndarray, " N"] | None = None,
    replay: bool = True,
) -> tuple[TrainBatch, PaddedBatch]:
    """Pads some sequences into one micro-batch.

    Args:
      trajectories: where the sequences come from.
      indices: which sequences.
      length, rows: padded shape.
      num_layers: L of the model.
      advantages: one per sequence of `trajectories`; None for zeros.
      logp_old: one per token of `trajectories`.
      replay: whether routes are passed on.

    Returns:
      Device arrays, and the host batch they were made from.
    """
    padded = pad_batch(trajectories, indices, length, rows)
    per_row = np.zeros(rows, np.float32)
    temperature = np.ones(rows, np.float32)
    per_row[padded.rows] = 0.0 if advantages is None else advantages[indices]
    temperature[padded.rows] = trajectories.temperature[indices]
    batch = TrainBatch(
        tokens=jnp.asarray(padded.tokens),
        positions=jnp.asarray(padded.positions),
        segment_ids=jnp.asarray(padded.segment_ids),
        sampled=jnp.asarray(padded.sampled),
        logp_rollout=jnp.asarray(padded.logprobs),
        logp_old=None if logp_old is None else jnp.asarray(_scatter(logp_old, trajectories, padded)),
        advantages=jnp.asarray(np.broadcast_to(per_row[:, None], padded.shape)),
        temperature=jnp.asarray(temperature),
        routes=jnp.asarray(padded.routed_experts) if replay and padded.routed_experts is not None else None,
        guides=None if padded.guidance is None else _guides(padded.guidance, num_layers),
    )
    return batch, padded


def _guides(guidance: PaddedGuidance, num_layers: int) -> GuideBatch:
    sites = {}
    for name, site in guidance.sites.items():
        slots = np.full(num_layers, -1, np.int32)
        slots[site.layer_ids] = np.arange(site.layer_ids.size)
        data = None if site.data is None else jnp.asarray(site.data)
        multiplier = None if site.multiplier is None else jnp.asarray(site.multiplier)
        sites[name] = SiteGuide(data, jnp.asarray(site.scales), multiplier, jnp.asarray(slots))
    return GuideBatch(sites, jnp.asarray(guidance.valid), guidance.kind)


def _scatter(values: np.ndarray, trajectories: Trajectories, padded: PaddedBatch) -> np.ndarray:
    out = np.zeros(padded.shape, np.float32)
    offsets = trajectories.offsets
    for index, row, start, length in zip(padded.sequence_indices, padded.rows, padded.starts, padded.lengths, strict=True):
        out[row, start : start + length] = values[offsets[index] : offsets[index] + length]
    return out
