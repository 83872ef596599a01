"""The benchmark of the ops that are asked for."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.benchmark import attention, elementwise, fused, products
from pallas_kernels.benchmark.cases import Case, Setting
from pallas_kernels.benchmark.limits import copy_bandwidth, measure_limits
from pallas_kernels.benchmark.rows import measure
from pallas_kernels.benchmark.timing import Timer

CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {
    **{op: functools.partial(elementwise.cases, op) for op in elementwise.TARGETS},
    **{op: functools.partial(fused.cases, op) for op in fused.FUSED},
    "grouped_matmul": products.grouped,
    "grouped_matmul_w4a16": products.grouped_w4,
    "matmul_w4": products.single_w4,
    "decode_attention": attention.decode,
    "kv_append": attention.append_tokens,
}
"""Op -> the measurements it is made of."""

OPS = tuple(CASES)

MEMORY_BOUND = (*elementwise.TARGETS, *fused.FUSED, "kv_append")
"""Those without products."""

CALLS = 6
"""Calls in one program on a GPU."""


def run(ops: list[str] | None = None, small: bool = False, note: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Benchmark rows, one for each op, format, implementation and shape.

    Args:
      ops: names from OPS; None takes all.
      small: toy shapes, few repetitions, and the Pallas kernels also on CPU (interpreted, so the time says nothing).
      note: is told what is being timed.

    Returns:
      Dicts with op, implementation, shape, dtype, time_us (median), bytes (that must be read and written), flops (null: bound by memory),
      limit_share (the time that the measured limits allow, over time_us), peer (the fastest), peer_time_us, ratio (time_us over
      peer_time_us), target, met, device, versions, date. target and met are set for compiled kernels only, met is null where the
      peer that the target names is missing. What a call that failed has no value for is null; the log says why it failed.

    Raises:
      ValueError: an unknown op.
    """
    chosen = list(OPS) if ops is None else ops
    unknown = sorted(set(chosen) - set(OPS))
    if unknown:
        raise ValueError(f"unknown op {', '.join(unknown)}; write one of {', '.join(OPS)}")
    setting = Setting(small, jax.default_backend() == "gpu")
    timer = Timer(1 if setting.toy else CALLS)
    limits = measure_limits(setting, timer, products=any(op not in MEMORY_BOUND for op in chosen))
    # What memory binds is compared with a copy of its own size.
    bandwidth = functools.cache(functools.partial(copy_bandwidth, setting, timer))
    rows = []
    for op in chosen:
        note(f"timing {op}")
        cases = list(CASES[op](setting))
        if not setting.toy:
            # Most of the time would go here. Libraries that a peer calls are tuned while it is compiled, so peers wait for their turn.
            timer.compile(case.call for case in cases)
        for case in cases:
            own = limits if case.flops is not None else limits._replace(bandwidth=bandwidth(case.bytes))
            rows.append(measure(case, timer, own, setting))
    return rows
