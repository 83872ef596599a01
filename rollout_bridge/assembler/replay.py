"""Recorded trajectories as records for a replay inside vLLM (`vllm_plugin.replay`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trace_jax.rollout.trajectories import Trajectories


def replay_records(trajectories: Trajectories) -> Iterator[dict[str, np.ndarray]]:
    """One record for each sequence, of the rows that have codes and routes.

    Args:
      trajectories: from `GuidanceCache.get`, with full codes; routes are replayed if there are any.

    Raises:
      ValueError: no guidance, not of kind `codes`, or multipliers of the tokens' own.
    """
    record = trajectories.guidance
    if record is None or record.kind != "codes":
        raise ValueError(f"a replay needs full codes, not {record and record.kind!r}; record with guidance.record: codes")
    if any(site.per_token_multiplier for site in record.sites.values()):
        raise ValueError("a replay needs static multipliers; these trajectories were recorded under several")
    for index in range(trajectories.num_sequences):
        one = trajectories.sequence(index)
        assert one.guidance is not None
        valid = one.guidance.valid if one.routes is None else one.guidance.valid & one.routes.routes_valid
        rows = np.flatnonzero(valid)
        arrays = {
            "sample": np.repeat(one.sample_id, rows.size),
            "attempt": np.repeat(one.attempt, rows.size),
            "position": rows.astype(np.uint32),
        }
        for name, site in one.guidance.sites.items():
            arrays |= {f"{name}.data": site.data[rows], f"{name}.scales": site.scales[rows]} if site.data is not None else {}
            arrays[f"{name}.layers"] = site.layer_ids.astype(np.uint16)
            if site.multiplier is not None:
                arrays[f"{name}.multiplier"] = site.multiplier
        if one.routes is not None:
            arrays |= {"routes.ids": one.routes.routed_experts[rows], "routes.layers": one.routes.moe_layer_ids.astype(np.uint16)}
        yield arrays
