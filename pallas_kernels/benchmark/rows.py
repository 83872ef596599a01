"""Measurements as rows of the agreed columns."""

import datetime
import logging
from typing import Any

import jax
import numpy as np

from pallas_kernels.benchmark.cases import Case, Setting
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.timing import Timer

_LOG = logging.getLogger(__name__)
_MEASURED = "op implementation shape dtype time_us bytes flops limit_share peer peer_time_us ratio target met".split()
"""Columns whose values belong to a row; device, versions and date follow."""

_SOONEST = 2 / 3
"""Share of the time in which a copy moves its bytes that a peer takes at least: reading alone is faster than copying."""


def new_row(**values: Any) -> dict[str, Any]:
    """A row with these values, null in the other columns, and where and when it was made."""
    unknown = sorted(set(values) - set(_MEASURED))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not a column; columns: {', '.join(_MEASURED)}")
    return {name: values.get(name) for name in _MEASURED} | {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "date": datetime.date.today().isoformat(),
    }


def measure(case: Case, timer: Timer, limits: Limits, setting: Setting) -> dict[str, Any]:
    """Times a case and its peers.

    A peer that cannot serve, or whose time is an artefact, is logged and does not count. A case that fails is logged too and its row has
    no time, so that the other rows are not lost.
    """
    target = case.target if setting.on_gpu else None
    common = {
        "op": case.op,
        "implementation": "pallas (interpreted)" if case.implementation == "pallas" and not setting.on_gpu else case.implementation,
        "shape": case.shape,
        "dtype": "bfloat16",
        "bytes": case.bytes,
        "flops": case.flops,
        "target": None if target is None else target.text,
    }
    try:
        time_us = timer.time_us(case.call)
    except Exception as error:
        _LOG.error("%s, %s, %s failed: %s: %.2000s", case.op, case.implementation, case.shape, type(error).__name__, error)
        return new_row(**common, met=None if target is None else False)
    share = limits.share(case.bytes, case.flops, time_us)
    peer, peer_time_us = _fastest_peer(case, timer, limits)
    ratio = None if peer_time_us is None else round(time_us / peer_time_us, 4)
    return new_row(
        **common,
        time_us=round(time_us, 2),
        limit_share=round(share, 4),
        peer=peer,
        peer_time_us=None if peer_time_us is None else round(peer_time_us, 2),
        ratio=ratio,
        met=None if target is None else target.met(time_us, share, case.flops, peer, ratio),
    )


def _fastest_peer(case: Case, timer: Timer, limits: Limits) -> tuple[str | None, float | None]:
    times: dict[str, float] = {}
    for peer in case.peers:
        try:
            time_us = timer.time_us(peer.call)
        except Exception as error:  # whatever the code of others raises, it cannot serve
            _LOG.warning("%s: %s cannot serve: %s: %.200s", case.op, peer.name, type(error).__name__, error)
            continue
        if time_us * 1e-6 < _SOONEST * peer.bytes / limits.bandwidth:
            _LOG.warning("%s: %s took %.1f us, less than moving its bytes takes; not counted", case.op, peer.name, time_us)
            continue
        times[peer.name] = time_us
    if not times:
        return None, None
    best = min(times, key=lambda name: times[name])
    return best, times[best]
