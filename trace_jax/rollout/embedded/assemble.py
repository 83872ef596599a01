"""Turns finished and aborted requests into ragged trajectories.

Records of a row of a wave live in *columns*: columns 0..P-1 are the prompt's positions, column P+j is the j-th fed answer token, at
position `length + j`. The last token of a row was never fed and gets a blank, invalid record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Int64

from pallas_kernels import block_format
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import SiteRecord
from trace_jax.models.registry import ModelConfig
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout.audit import Audit
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.engine import Request
from trace_jax.rollout.routes import Routes, route_dtype
from trace_jax.rollout.trajectories import FinishReason, Trajectories


@dataclass(frozen=True, eq=False)
class WaveRecords:
    """Host arrays of a wave.

    Args:
      prompt_width: P, padded prompt length.
      token, logprob, live: drawn tokens `[B, M]`; `live` is false once a row had finished.
      routes: `[B, P + M - 1, Lm, k]` by column.
      sites: per site `data`, `scales`, `multiplier` with axes `[Ls, B, column, ...]`.
    """

    prompt_width: int
    token: Int32[np.ndarray, "B M"]
    logprob: Float32[np.ndarray, "B M"]
    live: Bool[np.ndarray, "B M"]
    routes: Int[np.ndarray, "B C Lm k"]
    sites: dict[str, dict[str, np.ndarray | None]]


def assemble(
    requests: Sequence[Request],
    wave: WaveRecords,
    *,
    capture: CaptureSpec,
    kept: CaptureSpec,
    plan: QuantPlan,
    multipliers: dict[str, Float32[np.ndarray, " L"]],
    config: ModelConfig,
    version: int,
) -> Trajectories:
    """Builds the trajectories of a wave.

    Args:
      requests: one per real row, in row order; padding rows follow them.
      capture: what the wave recorded.
      kept: what the trajectories carry; smaller than `capture` in a wave with audited requests.
      config: of the model: the layers and the width of each site.
      version: weight version of the wave.
    """
    rows = len(requests)
    prompt = np.asarray([request.tokens.size for request in requests], np.int64)
    answer = wave.live[:rows].sum(axis=1).astype(np.int64)
    length = prompt + answer
    offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    row = np.repeat(np.arange(rows), length)
    position = np.arange(offsets[-1]) - offsets[row]
    in_answer = position >= prompt[row]
    step = np.where(in_answer, position - prompt[row], 0)
    tokens = np.concatenate([request.tokens for request in requests]) if rows else np.zeros(0, np.int32)
    all_tokens = np.zeros(offsets[-1], np.int32)
    all_tokens[~in_answer] = tokens
    all_tokens[in_answer] = wave.token[row, step][in_answer]
    logprobs = np.where(in_answer, wave.logprob[row, step], np.float32(0.0)).astype(np.float32)

    fed = position < length[row] - 1
    column = np.where(in_answer, wave.prompt_width + step, position)
    column = np.where(fed, column, 0)
    full = _record(wave, capture, plan, multipliers, config, row, column, fed, version)
    trajectories = Trajectories(
        offsets=offsets,
        tokens=all_tokens,
        sampled=in_answer,
        logprobs=logprobs,
        weight_version=np.full(offsets[-1], version, np.int32),
        finish_reason=_finish_reasons(requests, wave, answer),
        **_per_request(requests),
        routes=_routes(wave, config, row, column, fed),
        guidance=None if full is None else _compact(full, kept),
    )
    return trajectories if full is None else trajectories.replace(audit=_audit(requests, full, length, row))


def without_answers(requests: Sequence[Request], version: int) -> Trajectories:
    """Aborted requests as sequences of their prompt alone."""
    lengths = [request.tokens.size for request in requests]
    count = sum(lengths)
    return Trajectories(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.concatenate([request.tokens for request in requests]).astype(np.int32),
        sampled=np.zeros(count, bool),
        logprobs=np.zeros(count, np.float32),
        weight_version=np.full(count, version, np.int32),
        finish_reason=np.full(len(requests), FinishReason.ABORTED, np.uint8),
        **_per_request(requests),
    )


def _per_request(requests: Sequence[Request]) -> dict[str, Any]:
    """The columns that an answer does not change; the reward is not known yet."""
    return {
        "sample_id": np.asarray([request.sample_id for request in requests], np.uint64),
        "prompt_id": np.asarray([request.prompt_id for request in requests], np.uint64),
        "group": np.asarray([request.group for request in requests], np.int64),
        "attempt": np.asarray([request.attempt for request in requests], np.uint16),
        "temperature": np.asarray([request.temperature for request in requests], np.float32),
        "reward": np.full(len(requests), np.nan, np.float32),
    }


def _finish_reasons(requests: Sequence[Request], wave: WaveRecords, answer: Int64[np.ndarray, " B"]) -> np.ndarray:
    last = wave.token[np.arange(len(requests)), answer - 1]
    stopped = [int(token) in request.stop_token_ids for request, token in zip(requests, last, strict=True)]
    return np.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(np.uint8)


def _routes(wave: WaveRecords, config: ModelConfig, row: np.ndarray, column: np.ndarray, fed: np.ndarray) -> Routes | None:
    """The routes of the layers that have experts; None for a dense model."""
    if not config.moe_layer_ids:
        return None
    routed = wave.routes[row, column].astype(route_dtype(config.num_experts))
    routed[~fed] = 0
    return Routes(routed, fed, np.asarray(config.moe_layer_ids, np.int32))


def _record(
    wave: WaveRecords,
    capture: CaptureSpec,
    plan: QuantPlan,
    multipliers: dict[str, np.ndarray],
    config: ModelConfig,
    row: np.ndarray,
    column: np.ndarray,
    fed: np.ndarray,
    version: int,
) -> GuidanceRecord | None:
    if not wave.sites or capture.kind == "none":
        return None

    def gather(array: np.ndarray | None, blank: float = 0) -> np.ndarray | None:
        if array is None:
            return None
        rows = np.ascontiguousarray(np.moveaxis(array[:, row, column], 0, 1))
        rows[~fed] = blank
        return rows

    sites = {}
    for name, arrays in wave.sites.items():
        layer_ids = np.asarray([layer for layer in capture.layers if layer in config.layers_of(name)], np.int32)
        block = block_format(plan.site(name).format)
        multiplier = gather(arrays["multiplier"], blank=1)
        if multiplier is None and block.has_multiplier:
            multiplier = np.ascontiguousarray(multipliers[name][layer_ids])
        scales = gather(arrays["scales"])
        assert scales is not None  # every capture has scales
        sites[name] = SiteRecord(block.name, block.block, config.sites[name].width, layer_ids, gather(arrays["data"]), scales, multiplier)
    return GuidanceRecord(capture.kind, sites, fed, np.full(row.size, version, np.int32))


def _compact(record: GuidanceRecord, kept: CaptureSpec) -> GuidanceRecord | None:
    if kept.kind == "none":
        return None
    chosen = {name: site for name, site in record.sites.items() if name in kept.sites}
    return replace(record, sites=chosen).to_compact(kept.kind, kept.layers)


def _audit(requests: Sequence[Request], full: GuidanceRecord, length: np.ndarray, row: np.ndarray) -> Audit | None:
    audited = np.asarray([index for index, request in enumerate(requests) if request.audit], np.int64)
    if not audited.size:
        return None
    return Audit(audited, full.take(np.flatnonzero(np.isin(row, audited))))
