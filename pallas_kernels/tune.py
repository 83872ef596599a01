"""Times the sizes that a kernel's programs may have on this GPU, and writes the fastest into the table (`tilings`).

    python -m pallas_kernels.tune [KERNEL ...]        # every kernel of the table, or those named

1. Each kernel has a problem of a real model and candidates. Those of the grouped products divide 128 rows, 256 columns and a step of
   64, so that no device refuses shapes that another serves.
2. A candidate that does not compile here, for want of registers or shared memory, is left out.
3. The others are timed as the benchmark times. The present sizes stay unless another's time is less by more than 2 %.

Exit code 2 without a GPU or for an unknown kernel. The GPU tests take their sizes from the table: run them afterwards.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import tilings
from pallas_kernels.benchmark.runner import CALLS
from pallas_kernels.benchmark.timing import Call, Timer
from pallas_kernels.decode_attention import pallas as attention
from pallas_kernels.decode_attention.paged_kv import empty_paged_kv
from pallas_kernels.fake_quant.pallas import fake_quant
from pallas_kernels.formats import NVFP4
from pallas_kernels.grouped_matmul import pallas as grouped
from pallas_kernels.grouped_matmul_w4 import pallas as grouped_w4
from pallas_kernels.grouped_matmul_w4.layout import prepare_w4
from pallas_kernels.quantize.api import quantize
from pallas_kernels.residual_fake_quant.pallas import residual_fake_quant
from pallas_kernels.tilings import Sizes

TimeUs: TypeAlias = Callable[[Callable[..., Array], tuple[Any, ...]], float]
"""From a function and its arguments to the time of a call in microseconds."""

_GAIN = 0.98
_EXPERTS, _FEATURES, _SIZE = 128, 768, 2048  # Qwen3-30B-A3B


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What is timed for a kernel.

    Args:
      choices: for each of the sizes those that are tried, in all combinations.
      problem: makes the arrays of a call.
      run: the call, from sizes and those arrays, compiled for a GPU.
    """

    choices: dict[str, tuple[int, ...]]
    problem: Callable[[], tuple[Any, ...]]
    run: Callable[..., Array]

    @property
    def candidates(self) -> list[dict[str, int]]:
        """Every combination of the choices."""
        return [dict(zip(self.choices, values, strict=True)) for values in itertools.product(*self.choices.values())]


def _normal(*shape: int) -> Float[Array, "*s"]:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)


def _rows(count: int) -> Any:
    """Group sizes of rows that are spread evenly."""
    return jnp.full((_EXPERTS,), count // _EXPERTS, jnp.int32)


def _quantizers() -> tuple[Any, ...]:
    return _normal(8192, _SIZE), jnp.ones((), jnp.float32)


def _run_quantizers(sizes: Sizes, x, multiplier) -> Array:
    return fake_quant(x, multiplier, NVFP4, False, sizes["tile"])


def _half_compensated() -> tuple[Any, ...]:
    return _normal(8192, _SIZE), jnp.arange(0, _SIZE, 2, dtype=jnp.int32), jnp.ones((), jnp.float32)


def _run_residual(sizes: Sizes, x, channels, multiplier) -> Array:
    return residual_fake_quant(x, channels, multiplier, NVFP4, False, sizes["tile"], sizes["num_warps"])[0]


def _grouped(product: str) -> Tunable:
    def problem() -> tuple[Any, ...]:
        x, cotangent, weights = _normal(65536, _SIZE), _normal(65536, _FEATURES), _normal(_EXPERTS, _FEATURES, _SIZE)
        sides = {"forward": (x, weights), "grad_x": (cotangent, weights), "grad_weights": (cotangent, x)}[product]
        return *sides, _rows(65536)

    def run(sizes: Sizes, left, right, group_sizes) -> Array:
        return getattr(grouped, product)(left, right, group_sizes, grouped.Tiling(**sizes), False)

    choices = {"rows": (64, 128), "columns": (128, 256), "step": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
    return Tunable(choices, problem, run)


def _grouped_w4(rows: int) -> Tunable:
    def problem() -> tuple[Any, ...]:
        weights = quantize(_normal(_EXPERTS, _FEATURES, _SIZE), NVFP4)
        return _normal(rows, _SIZE), prepare_w4(weights), _rows(rows)

    def run(sizes: Sizes, x, weights, group_sizes) -> Array:
        return grouped_w4.grouped_matmul_w4a16(x, weights, group_sizes, grouped_w4.choose_tiling(rows, weights, False, sizes), False)

    return Tunable({"features": (64, 128, 256), "num_stages": (2, 3, 4), "programs": (264, 528, 1056)}, problem, run)


def _attention() -> tuple[Any, ...]:
    """64 sequences of 4096 tokens, eight KV heads of 128 and four query heads each."""
    cache = empty_paged_kv(4096, 64, 8, 128, jnp.arange(4096, dtype=jnp.int32).reshape(64, 64), NVFP4, jnp.ones(()), jnp.ones(()))
    ones = jnp.full(cache.key_scales.shape, 0x3838, jnp.uint16)
    codes = jax.random.bits(jax.random.key(0), cache.key_codes.shape, jnp.uint16)
    lengths = jnp.full((64,), 4096, jnp.int32)
    cache = dataclasses.replace(cache, key_codes=codes, value_codes=codes, key_scales=ones, value_scales=ones, lengths=lengths)
    return _normal(64, 32, 128), cache


def _run_attention(sizes: Sizes, query, cache) -> Array:
    return attention.decode_attention(query, cache, 128**-0.5, False, attention.choose(cache, False, sizes))


KERNELS: dict[str, Tunable] = {
    "quantizers": Tunable({"tile": (64, 128, 256, 512)}, _quantizers, _run_quantizers),
    "grouped_matmul/forward": _grouped("forward"),
    "grouped_matmul/grad_x": _grouped("grad_x"),
    "grouped_matmul/grad_weights": _grouped("grad_weights"),
    "grouped_matmul_w4/few_rows": _grouped_w4(512),
    "grouped_matmul_w4/many_rows": _grouped_w4(8192),
    "residual_fake_quant": Tunable({"tile": (128, 256, 512), "num_warps": (2, 4, 8)}, _half_compensated, _run_residual),
    "decode_attention": Tunable(
        {"tokens": (32, 64), "code_bytes": (4096,), "num_warps": (1, 2), "num_stages": (3, 4, 5), "programs": (1584, 2112, 3168)},
        _attention,
        _run_attention,
    ),
}
"""The kernels of the table. `quantizers` stands for all that take whole blocks and is timed on `fake_quant`."""


def timed(kernel: str, time_us: TimeUs) -> list[tuple[float, dict[str, int]]]:
    """(time, sizes) of the candidates that compile, fastest first."""
    tunable = KERNELS[kernel]
    arguments = tunable.problem()
    times = []
    for sizes in tunable.candidates:
        try:
            times.append((time_us(functools.partial(tunable.run, sizes), arguments), sizes))
        except jax.errors.JaxRuntimeError:
            continue
    return sorted(times, key=lambda pair: pair[0])


def chosen(times: list[tuple[float, dict[str, int]]], present: Sizes) -> dict[str, int]:
    """The fastest sizes, or the present ones if these are as fast within the noise of a measurement."""
    fastest, sizes = times[0]
    own = [time for time, candidate in times if candidate == present]
    return dict(present) if own and fastest > _GAIN * own[0] else sizes


def _time_us(function: Callable[..., Array], arguments: tuple[Any, ...]) -> float:
    return Timer(CALLS).time_us(Call(function, arguments))


def main(kernels: list[str], time_us: TimeUs = _time_us) -> int:
    """Tunes and writes; the exit code is in the description of the module."""
    unknown = sorted(set(kernels) - set(KERNELS))
    if unknown:
        print(f"unknown kernel {', '.join(unknown)}; write one of {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    if jax.default_backend() != "gpu":
        print(f"tuning times compiled kernels and jax sees no GPU here; {tilings.PATH.name} stays as it is", file=sys.stderr)
        return 2
    device = jax.devices()[0].device_kind
    for kernel in kernels or KERNELS:
        present, times = tilings.lookup(kernel), timed(kernel, time_us)
        if not times:
            print(f"{kernel}: no candidate compiles on {device}; its sizes stay {dict(present)}", file=sys.stderr)
            continue
        sizes = chosen(times, present)
        tilings.write(device, kernel, sizes)
        by_time = {str(candidate): time for time, candidate in times}
        print(f"{device}, {kernel}: {sizes}, {by_time[str(sizes)]:.1f} us; fastest of {len(times)} {times[0][0]:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
