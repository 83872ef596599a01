"""Random trajectories with routes and a guidance record, as an engine would return them: the shape of training data, not its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from pallas_kernels import NVFP4
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import BITS_PER_VALUE, RecordKind, SiteRecord
from trace_jax.models.registry import ModelConfig
from trace_jax.quantization.multipliers import Multipliers, site_multiplier
from trace_jax.quantization.plan import RECORDED_SITES, SITES
from trace_jax.rollout.routes import Routes, route_dtype
from trace_jax.rollout.trajectories import FinishReason, Trajectories

_AMAX = 8.0
_SCALE_BYTES = (0x38, 0x60)
"""Range of the E4M3 scale bytes, 1 to 32: with `_AMAX` they span values of a normalised activation."""


def synthetic_multipliers(num_layers: int) -> Multipliers:
    """Static multipliers of every site, as calibration would give them for a largest magnitude of 8."""
    return {site: site_multiplier(site, jnp.full((num_layers,), _AMAX, jnp.float32)) for site in SITES}


def synthetic_trajectories(
    config: ModelConfig, sequences: int, length: int, record: RecordKind | Literal["none"], layers: Sequence[int], seed: int = 0
) -> Trajectories:
    """Sequences of one length, the first quarter prompt; valid by the data contract.

    Args:
      config: shape of the model.
      sequences: their number; every four share a group.
      length: tokens of each.
      record: kind of the NVFP4 guidance record, "none" for no record.
      layers: global ids of the recorded layers.
      seed: of everything.
    """
    rng = np.random.default_rng(seed)
    total = sequences * length
    position = np.tile(np.arange(length), sequences)
    sampled = position >= length // 4
    draws = rng.random((total, config.num_layers, config.num_experts), np.float32)
    experts = np.argpartition(draws, config.experts_per_token - 1, axis=-1)[..., : config.experts_per_token]
    is_input = position < length - 1  # the last token of a sequence is never an input
    return Trajectories(
        offsets=np.arange(sequences + 1, dtype=np.int64) * length,
        tokens=rng.integers(0, config.vocab_size, total, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -np.log(config.vocab_size), 0.0).astype(np.float32),
        weight_version=np.zeros(total, np.int32),
        sample_id=np.arange(sequences, dtype=np.uint64),
        prompt_id=np.arange(sequences, dtype=np.uint64) // np.uint64(4),
        group=np.arange(sequences, dtype=np.int64) // 4,
        attempt=np.zeros(sequences, np.uint16),
        temperature=np.ones(sequences, np.float32),
        finish_reason=np.full(sequences, FinishReason.LENGTH, np.uint8),
        reward=rng.random(sequences, np.float32),
        routes=Routes(experts.astype(route_dtype(config.num_experts)), is_input, np.arange(config.num_layers, dtype=np.int32)),
        guidance=None if record == "none" else _record(rng, config, is_input, record, layers),
    )


def _record(rng: np.random.Generator, config: ModelConfig, valid: np.ndarray, kind: RecordKind, layers: Sequence[int]) -> GuidanceRecord:
    multipliers = synthetic_multipliers(len(layers))
    widths = {"expert_input": (config.hidden_size,), "k": (config.num_kv_heads, config.head_dim)}
    widths["v"] = widths["k"]

    def site(name: str) -> SiteRecord:
        *lead, size = widths[name]
        rows = (valid.size, len(layers), *lead)
        data = rng.integers(0, 256, (*rows, -(-size * BITS_PER_VALUE[kind] // 8)), dtype=np.uint8)
        scales = rng.integers(*_SCALE_BYTES, (*rows, NVFP4.scales_bytes(size)), dtype=np.uint8)
        ids = np.asarray(layers, np.int32)
        return SiteRecord(
            NVFP4.name, NVFP4.block, size, ids, None if kind == "scales" else data, scales, np.asarray(multipliers[name], np.float32)
        )

    return GuidanceRecord(kind, {name: site(name) for name in RECORDED_SITES}, valid, np.zeros(valid.size, np.int32))
