"""Times of the kernels, against a plain copy on the same device and against the jnp reference.

1. For every op, format, implementation and shape: compile, warm up, then take the median of several timed batches of calls.
2. The limit is memory bandwidth: a device-to-device copy of a large array is timed in the same run, and a row's `limit_share` is the
   bandwidth that the op reached (its necessary bytes over its time) as a share of the copy's.
3. The peer of a Pallas or Triton row is the jnp reference on the same input; `ratio` is our time over the peer's.

A program calls the op on several inputs, so that no cache holds the working set, and several programs are under way before the
first wait, so that a dispatch costs no time as long as the device is busy.
"""

import datetime
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.containers import Guide
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.packing import mantissa_bits
from pallas_kernels.quantize.api import quantize
from pallas_kernels.shapes import ACTIVATIONS, SMALL, WEIGHTS

OPS = ("quantize", "dequantize", "fake_quant", "guided_fake_quant")

_TARGET_SHARES = {"quantize": 0.80, "dequantize": 0.80, "fake_quant": 0.92, "guided_fake_quant": 0.88}
"""Share of the copy's bandwidth that a compiled kernel should reach."""

_BATCHES = 5
CALLS, _PROGRAMS = 6, 8
"""Calls in one program, and programs under way before the first wait, on a GPU."""


def run(ops: list[str] | None = None, small: bool = False) -> list[dict[str, Any]]:
    """Benchmark rows, one for each op, format, implementation and shape.

    Args:
      ops: names from OPS; None takes all.
      small: toy shapes, few repetitions, and the Pallas kernels also on CPU (interpreted, so the time says nothing).

    Returns:
      Dicts with op, implementation, shape, dtype, time_us (median), bytes (read and written), flops (null: the ops are bound
      by memory), limit_share, peer, peer_time_us, ratio, target, met, device, versions, date. target and met are set for
      compiled kernels only.

    Raises:
      ValueError: an unknown op.
    """
    chosen = list(OPS) if ops is None else ops
    unknown = sorted(set(chosen) - set(OPS))
    if unknown:
        raise ValueError(f"unknown op {', '.join(unknown)}; write one of {', '.join(OPS)}")
    on_gpu = jax.default_backend() == "gpu"
    shapes = SMALL if small else (*ACTIVATIONS, *WEIGHTS) if on_gpu else ACTIVATIONS
    triton = ("triton",) if on_gpu and importlib.util.find_spec("jax_triton") else ()
    implementations = ("reference", "pallas", *triton) if on_gpu or small else ("reference",)
    calls = 1 if small or not on_gpu else CALLS
    copy = _copy_bandwidth(small, calls)
    rows = []
    for op in chosen:
        for fmt in (NVFP4, MXFP4):
            for name, shape in shapes:
                times: dict[str, float] = {}
                for implementation in implementations:
                    function, arguments, moved = _case(op, fmt, shape, implementation)
                    times[implementation] = median_time_us(function, arguments, calls)
                    rows.append(_row(op, fmt, implementation, name, shape, moved, times, copy, on_gpu))
    return rows


def _case(op: str, fmt: BlockFormat, shape: tuple[int, ...], implementation: str) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """(jitted function, its arguments, bytes it must read and write)."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    multiplier = jnp.float32(2.0**-9 * (1 + 2.0**-17)) if fmt.has_multiplier else None
    q = quantize(x, fmt, multiplier)
    packed = q.codes.nbytes + q.scales.nbytes
    if op == "quantize":
        return jax.jit(lambda x: quantize(x, fmt, multiplier, implementation=implementation)), (x,), x.nbytes + packed
    if op == "dequantize":
        return jax.jit(lambda q: dequantize(q, implementation=implementation)), (q,), x.nbytes + packed
    if op == "fake_quant":
        return jax.jit(lambda x: fake_quant(x, fmt, multiplier, implementation=implementation)), (x,), 2 * x.nbytes
    guide = Guide("mantissa", mantissa_bits(q.codes, shape[-1]), q.scales, None, jnp.ones(shape[:-1], bool))
    moved = 2 * x.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(guide))
    return jax.jit(lambda x, guide: guided_fake_quant(x, guide, fmt, multiplier, implementation=implementation)), (x, guide), moved


def _row(op, fmt, implementation, name, shape, moved, times, copy, on_gpu) -> dict[str, Any]:
    time_us = times[implementation]
    share = moved / (time_us * 1e-6) / copy
    has_peer = implementation != "reference"
    judged = has_peer and on_gpu
    return {
        "op": f"{op}/{fmt.name}",
        "implementation": implementation if implementation == "reference" or on_gpu else "pallas (interpreted)",
        "shape": f"{name}: {'x'.join(map(str, shape))}",
        "dtype": "bfloat16",
        "time_us": round(time_us, 2),
        "bytes": moved,
        "flops": None,
        "limit_share": round(share, 4),
        "peer": "jnp reference" if has_peer else None,
        "peer_time_us": round(times["reference"], 2) if has_peer else None,
        "ratio": round(time_us / times["reference"], 4) if has_peer else None,
        "target": f"share of copy bandwidth >= {_TARGET_SHARES[op]:.2f}" if judged else None,
        "met": share >= _TARGET_SHARES[op] if judged else None,
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "date": datetime.date.today().isoformat(),
    }


def _copy_bandwidth(small: bool, calls: int) -> float:
    """Bytes a second (read and written) of a device-to-device copy of an array that no cache holds."""
    x = jnp.zeros((1 << (22 if small else 26),), jnp.bfloat16)
    # XLA on CPU hands a copy its input without moving a byte.
    operation = jnp.copy if jax.default_backend() == "gpu" else jnp.negative
    return 2 * x.nbytes / (median_time_us(jax.jit(operation), (x,), calls) * 1e-6)


def median_time_us(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Median time of one call, out of `calls` in one program on as many copies of the arguments; one call is waited for."""
    copies = [jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), arguments) for _ in range(calls)]
    program = jax.jit(lambda copies: [function(*each) for each in copies])
    jax.block_until_ready(program(copies))
    programs = _PROGRAMS if calls > 1 else 1
    times = []
    for _ in range(_BATCHES):
        start = time.perf_counter()
        jax.block_until_ready([program(copies) for _ in range(programs)])
        times.append((time.perf_counter() - start) / (calls * programs) * 1e6)
    return statistics.median(times)
