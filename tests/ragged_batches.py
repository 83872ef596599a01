"""Random ragged trajectories for the rollout and guidance tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import BITS_PER_VALUE, BLOCKS, SiteRecord
from trace_jax.rollout.audit import Audit
from trace_jax.rollout.routes import Routes, route_dtype
from trace_jax.rollout.trajectories import Trajectories


def random_site(rng, num_tokens, layer_ids, lead, size, kind, block_format="nvfp4", per_token=False) -> SiteRecord:
    shape = (num_tokens, len(layer_ids), *lead)
    block = BLOCKS[block_format]
    data = None
    if kind != "scales":
        values = rng.integers(0, 2 ** BITS_PER_VALUE[kind], (*shape, size), dtype=np.uint8)
        data = pack(values, BITS_PER_VALUE[kind])
    multiplier = None
    if block_format == "nvfp4":
        rows = (num_tokens, len(layer_ids)) if per_token else (len(layer_ids),)
        multiplier = np.exp2(-rng.integers(0, 8, rows)).astype(np.float32)
    scales = rng.integers(0, 127, (*shape, -(-size // block)), dtype=np.uint8)
    return SiteRecord(block_format, block, size, np.asarray(layer_ids, np.int32), data, scales, multiplier)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack 1- or 4-bit values on the last axis, first value in the lowest bits: the contract, written plainly."""
    per_byte = 8 // bits
    packed = np.zeros((*values.shape[:-1], -(-values.shape[-1] // per_byte)), np.uint8)
    for index in range(values.shape[-1]):
        packed[..., index // per_byte] |= values[..., index] << (bits * (index % per_byte))
    return packed


def random_record(rng, num_tokens, kind: Any = "mantissa", layer_ids=(2, 3), **options: Any) -> GuidanceRecord:
    sites = {
        "expert_input": random_site(rng, num_tokens, layer_ids, (), 40, kind, **options),
        "k": random_site(rng, num_tokens, layer_ids, (2,), 24, kind, **options),
        "v": random_site(rng, num_tokens, layer_ids[-1:], (2,), 24, kind, **options),
    }
    return GuidanceRecord(kind, sites, rng.random(num_tokens) < 0.8, rng.integers(0, 5, num_tokens, dtype=np.int32))


def routes_from_ids(ids: np.ndarray, layer_ids, num_experts: int) -> Routes:
    """Routes from integer ids; a row with a negative id has no route."""
    valid = np.all(ids >= 0, axis=(1, 2))
    stored = np.where(valid[:, None, None], ids, 0).astype(route_dtype(num_experts))
    return Routes(stored, valid, np.asarray(list(layer_ids), np.int32))


def random_trajectories(lengths, seed=0, first_id=0, guidance: Any = "mantissa", routes=True, audit=False, top=0, **options: Any) -> Any:
    """Sequences of the given lengths with everything random; `guidance` is a kind or None."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count, total = lengths.size, int(offsets[-1])
    sampled = rng.random(total) < 0.6
    columns: dict[str, Any] = {}
    if routes:
        ids = rng.integers(0, 300, (total, 3, 2))
        ids[rng.random(total) < 0.1] = -1
        ids[offsets[1:][lengths > 0] - 1] = -1
        columns["routes"] = routes_from_ids(ids, [1, 2, 3], 300)
    if guidance:
        columns["guidance"] = random_record(rng, total, guidance, **options)
    if audit:
        chosen = np.arange(0, count, 2)
        columns["audit"] = Audit(chosen, random_record(rng, int(lengths[chosen].sum()), "codes", (0, 1, 2, 3), **options))
    if top:
        columns["top_ids"] = rng.integers(0, 90, (total, top), dtype=np.int32)
        columns["top_logprobs"] = -rng.random((total, top), np.float32)
    reward = rng.random(count).astype(np.float32)
    reward[::3] = np.nan
    return Trajectories(
        offsets=offsets,
        tokens=rng.integers(0, 90, total, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(total), 0).astype(np.float32),
        weight_version=rng.integers(0, 5, total, dtype=np.int32),
        sample_id=(first_id + np.arange(count)).astype(np.uint64),
        prompt_id=rng.integers(0, 2**63, count).astype(np.uint64) * np.uint64(2),
        group=rng.integers(-5, 5, count),
        attempt=rng.integers(0, 9, count).astype(np.uint16),
        temperature=rng.random(count).astype(np.float32),
        finish_reason=rng.integers(0, 3, count).astype(np.uint8),
        reward=reward,
        **columns,
    )


def assert_same(first: Any, second: Any, where: str = "") -> None:
    """Two dataclasses of arrays are equal, bit for bit (NaN equals NaN), with equal dtypes."""
    assert type(first) is type(second), where
    if isinstance(first, np.ndarray):
        assert first.dtype == second.dtype, where
        np.testing.assert_array_equal(first, second, err_msg=where)
    elif dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            assert_same(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}")
    elif isinstance(first, dict):
        assert list(first) == list(second), where
        for key in first:
            assert_same(first[key], second[key], f"{where}.{key}")
    else:
        assert first == second, where
