"""Padded and packed views of trajectories: the rectangular arrays that the compiled trainer reads.

Token t of sequence s lands in row `rows[s]`, column `starts[s] + t`. `pad_batch` gives each sequence a row of its own,
`pack_batch` several sequences one row; both fill the same arrays, so a packed batch holds per token exactly what the padded
one holds. Everything that is not a token is zero and invalid: segment 0, not sampled, no route (-1), no guidance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt8

from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import RecordKind, SiteRecord
from trace_jax.rollout.routes import FREE
from trace_jax.rollout.trajectories import Trajectories, token_rows


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedSite:
    """One guidance site, layers first; see `SiteRecord` for the fields.

    The multiplier is [Ls], or [Ls, B, T] if it belongs to tokens (1 at padding: a zero is not a legal scale).
    """

    format: str
    block: int
    size: int
    layer_ids: Int32[np.ndarray, " Ls"]
    data: UInt8[np.ndarray, "Ls B T *lead bytes"] | None
    scales: UInt8[np.ndarray, "Ls B T *lead blocks"]
    multiplier: Float32[np.ndarray, " Ls"] | Float32[np.ndarray, "Ls B T"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedGuidance:
    """The guidance record of a padded batch; `valid` is false at padding and where the rollout gave no record."""

    kind: RecordKind
    sites: Mapping[str, PaddedSite]
    valid: Bool[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedBatch:
    """B rows of T columns.

    Attributes:
        tokens: token ids, 0 at padding.
        positions: position inside the sequence, from 0.
        segment_ids: 1, 2, ... for the sequences of a row, 0 at padding.
        sampled: the policy drew the token at this column; its log-prob is predicted from the column before.
        logprobs: rollout log-prob of the token at this column, 0 where not sampled.
        weight_version: rollout weight version, 0 at padding.
        routed_experts: expert ids, -1 (choose freely) at padding, last tokens and missing rows; None without routes.
        guidance: guidance record; None without one.
        sequence_indices: which sequences of the trajectories are inside, S of them.
        rows: row of each.
        starts: first column of each.
        lengths: tokens of each.
    """

    tokens: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    sampled: Bool[np.ndarray, "B T"]
    logprobs: Float32[np.ndarray, "B T"]
    weight_version: Int32[np.ndarray, "B T"]
    routed_experts: Int32[np.ndarray, "B T Lm k"] | None
    guidance: PaddedGuidance | None
    sequence_indices: Int64[np.ndarray, " S"]
    rows: Int64[np.ndarray, " S"]
    starts: Int64[np.ndarray, " S"]
    lengths: Int64[np.ndarray, " S"]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def gather(self, values: Shaped[np.ndarray, "B T *rest"]) -> Shaped[np.ndarray, " N *rest"]:
        """Back to ragged [N, *rest]: the values at real tokens, one sequence after the other as in `sequence_indices`."""
        return np.asarray(values).reshape(-1, *values.shape[2:])[self._cells()]

    def scatter(self, values: Shaped[np.ndarray, " N"], fill: float) -> Shaped[np.ndarray, "B T"]:
        """The reverse of `gather`: ragged values at the real tokens, `fill` at padding."""
        flat = np.full(self.tokens.size, fill, values.dtype)
        flat[self._cells()] = values
        return flat.reshape(self.shape)

    def _cells(self) -> Int64[np.ndarray, " N"]:
        return token_rows(self.rows * self.shape[1] + self.starts, self.lengths)


def pad_batch(trajectories: Trajectories, sequence_indices: Sequence[int], length: int, rows: int | None = None) -> PaddedBatch:
    """One sequence a row.

    Args:
        trajectories: where the sequences come from.
        sequence_indices: sequences to take, in row order.
        length: T, at least the longest of them.
        rows: B; rows past the sequences are padding. None takes as many rows as sequences.

    Raises:
        ValueError: a sequence is longer than `length`, or there are more sequences than rows.
    """
    return pack_batch(trajectories, [[index] for index in sequence_indices], length, rows)


def pack_batch(trajectories: Trajectories, bins: Sequence[Sequence[int]], length: int, rows: int | None = None) -> PaddedBatch:
    """Several sequences a row, one after the other.

    Args:
        trajectories: where the sequences come from.
        bins: for each row the sequences to put there.
        length: T, at least the tokens of each row.
        rows: B; None takes `len(bins)`.

    Raises:
        ValueError: a row does not fit `length`, or there are more bins than rows.
    """
    num_rows = len(bins) if rows is None else rows
    if len(bins) > num_rows:
        raise ValueError(f"rows: {len(bins)} rows of sequences do not fit {num_rows}")
    chosen = np.asarray([index for members in bins for index in members], np.int64)
    row_of = np.repeat(np.arange(len(bins), dtype=np.int64), [len(members) for members in bins])
    lengths = trajectories.lengths()[chosen]
    ends = np.cumsum(lengths)
    # Tokens before a sequence, minus tokens before its row, is its first column.
    before = ends - lengths
    new_row = np.flatnonzero(np.diff(row_of, prepend=-1))
    starts = before - np.repeat(before[new_row], np.diff(np.append(new_row, chosen.size)))
    if chosen.size and (starts + lengths).max() > length:
        raise ValueError(f"length: a row of {int((starts + lengths).max())} tokens does not fit {length}")
    ordinal = np.arange(chosen.size) - np.repeat(new_row, np.diff(np.append(new_row, chosen.size)))
    source = token_rows(trajectories.offsets[:-1][chosen], lengths)
    target = token_rows(row_of * length + starts, lengths)

    def scatter(values: Shaped[np.ndarray, " N *rest"], fill: int = 0) -> Shaped[np.ndarray, "B T *rest"]:
        out = np.full((num_rows * length, *values.shape[1:]), fill, values.dtype)
        out[target] = values
        return out.reshape(num_rows, length, *values.shape[1:])

    routed_experts = None
    if trajectories.routes is not None:
        routes = trajectories.routes
        # The last token never has a route, also if an engine ran one step too far and returned one.
        last = np.zeros(source.size, bool)
        last[ends[lengths > 0] - 1] = True
        known = routes.routes_valid[source] & ~last
        routed_experts = scatter(np.where(known[:, None, None], routes.routed_experts[source].astype(np.int32), np.int32(FREE)), FREE)
    return PaddedBatch(
        tokens=scatter(trajectories.tokens[source]),
        positions=scatter((source - np.repeat(trajectories.offsets[:-1][chosen], lengths)).astype(np.int32)),
        segment_ids=scatter(np.repeat(ordinal + 1, lengths).astype(np.int32)),
        sampled=scatter(trajectories.sampled[source]),
        logprobs=scatter(trajectories.logprobs[source]),
        weight_version=scatter(trajectories.weight_version[source]),
        routed_experts=routed_experts,
        guidance=None if trajectories.guidance is None else _pad_guidance(trajectories.guidance, source, target, (num_rows, length)),
        sequence_indices=chosen,
        rows=row_of,
        starts=starts,
        lengths=lengths,
    )


def _pad_guidance(
    record: GuidanceRecord, source: Int64[np.ndarray, " N"], target: Int64[np.ndarray, " N"], shape: tuple[int, int]
) -> PaddedGuidance:
    valid = np.zeros(shape[0] * shape[1], bool)
    valid[target] = record.valid[source]
    sites = {name: _pad_site(site, source, target, shape) for name, site in record.sites.items()}
    return PaddedGuidance(record.kind, sites, valid.reshape(shape))


def _pad_site(site: SiteRecord, source: Int64[np.ndarray, " N"], target: Int64[np.ndarray, " N"], shape: tuple[int, int]) -> PaddedSite:
    multiplier: Any = site.multiplier
    if site.per_token_multiplier:
        multiplier = _layers_first(multiplier[source][..., None], target, shape, np.ones)[..., 0]
    return PaddedSite(
        format=site.format,
        block=site.block,
        size=site.size,
        layer_ids=site.layer_ids,
        data=None if site.data is None else _layers_first(site.data[source], target, shape),
        scales=_layers_first(site.scales[source], target, shape),
        multiplier=multiplier,
    )


def _layers_first(
    values: Shaped[np.ndarray, "N Ls *rest"], target: Int64[np.ndarray, " N"], shape: tuple[int, int], make: Any = np.zeros
) -> Shaped[np.ndarray, "Ls B T *rest"]:
    """[N, Ls, *rest] tokens into [Ls, B, T, *rest] at the flat cells `target`."""
    num_layers, rest = values.shape[1], values.shape[2:]
    out = make((num_layers, shape[0] * shape[1], *rest), values.dtype)
    if values.size:
        # One opaque item a vector: NumPy then moves whole vectors instead of single bytes while it swaps the axes.
        item = np.dtype((np.void, values[0, 0].nbytes))
        cells = out.reshape(*out.shape[:2], -1).view(item)[..., 0]
        cells[:, target] = np.ascontiguousarray(values).reshape(*values.shape[:2], -1).view(item)[..., 0].T
    return out.reshape(num_layers, *shape, *rest)
