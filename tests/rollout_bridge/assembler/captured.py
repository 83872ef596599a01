"""Rows of real trajectories as workers would send them: what the embedded engine recorded, cut into forward passes and parts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rollout_bridge.assembler import Layout
from tests import tiny_policy
from tests.tiny_policy import CONFIG, LAYERS, PLANS
from trace_jax.guidance import GuidanceRecord
from trace_jax.quantization.plan import RECORDED_SITES
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.embedded.decode import CaptureSpec

HEAD = CONFIG.head_dim
WHOLE = {"expert_input": (0, CONFIG.hidden_size), "k": (0, 2 * HEAD), "v": (0, 2 * HEAD)}
RANKS = ({"expert_input": (0, CONFIG.hidden_size), "k": (0, HEAD), "v": (0, HEAD)}, {"k": (HEAD, 2 * HEAD), "v": (HEAD, 2 * HEAD)})
"""What each of two tensor-parallel workers sends: the first what both have, each its head."""


def layout(kind: Any = "codes", layers: tuple[int, ...] = LAYERS, audit: bool = False) -> Layout:
    """The layout of the tiny policy's engine."""
    return Layout.of(CONFIG, PLANS["nvfp4"], CaptureSpec(kind, RECORDED_SITES, layers), tiny_policy.multipliers(), audit=audit)


@functools.cache
def trajectories() -> Trajectories:
    """Six answers with full codes at every layer, and routes."""
    return generate(tiny_policy.engine(PLANS["nvfp4"], kind="codes"), tiny_policy.requests(6))


def recorded(found: Trajectories) -> GuidanceRecord:
    """Its record, which must be there."""
    assert found.guidance is not None
    return found.guidance


@functools.cache
def fed_rows() -> np.ndarray:
    """Rows that were an input: all but the last token of each sequence."""
    return np.flatnonzero(recorded(trajectories()).valid)


def keys(found: Trajectories, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, position) of rows."""
    sequence = np.searchsorted(found.offsets, rows, side="right") - 1
    return sequence, rows - found.offsets[sequence]


def record_of(
    found: Trajectories,
    rows: np.ndarray,
    parts: dict[str, tuple[int, int]] = WHOLE,
    *,
    record: GuidanceRecord | None = None,
    routes: bool = True,
    passes: int = 0,
    version: int = 0,
    prefix: str = "",
) -> dict[str, np.ndarray]:
    """One worker's record of a forward that held these rows."""
    sequence, position = keys(found, rows)
    arrays = {
        "sample": found.sample_id[sequence],
        "attempt": found.attempt[sequence],
        "position": position.astype(np.uint32),
        "pass": np.full(rows.size, passes, np.uint16),
        "version": np.full(rows.size, version, np.int32),
    }
    record = record or recorded(found)
    for name, (start, stop) in parts.items():
        site = record.sites[name]
        heads = slice(start // HEAD, stop // HEAD)
        for key, array in (("data", site.data), ("scales", site.scales)):
            if array is not None:
                arrays[f"{prefix}{name}.{key}"] = array[rows] if name == "expert_input" else array[rows][:, :, heads]
        arrays[f"{prefix}{name}.layers"] = site.layer_ids.astype(np.uint16)
        arrays[f"{prefix}{name}.part"] = np.asarray([start, stop], np.uint32)
        if site.multiplier is not None:
            arrays[f"{prefix}{name}.multiplier"] = site.multiplier
    if routes and found.routes is not None:
        arrays["routes.ids"] = found.routes.routed_experts[rows]
        arrays["routes.layers"] = found.routes.moe_layer_ids.astype(np.uint16)
        arrays["routes.part"] = np.asarray([0, CONFIG.experts_per_token], np.uint32)
    return arrays


def two_ranks(found: Trajectories, rows: np.ndarray, **changes: Any) -> list[dict[str, np.ndarray]]:
    """The records of a forward from both workers."""
    return [record_of(found, rows, parts, routes=rank == 0, **changes) for rank, parts in enumerate(RANKS)]


def assert_same(found: GuidanceRecord, expected: GuidanceRecord) -> None:
    """Equal bytes in every array but the version and the flags of the rows."""
    assert found.kind == expected.kind and list(found.sites) == list(expected.sites)
    np.testing.assert_array_equal(found.valid, expected.valid)
    for name, site in expected.sites.items():
        mine = found.sites[name].arrays()
        for key, array in site.arrays().items():
            assert mine[key].dtype == array.dtype
            np.testing.assert_array_equal(mine[key], array, err_msg=f"{name}.{key}")
