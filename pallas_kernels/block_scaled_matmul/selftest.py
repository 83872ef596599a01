"""`python -m pallas_kernels.block_scaled_matmul.selftest`: the first thing to run on a Blackwell GPU.

The kernel against the reference, one source of error after the other: the first line that fails says where to look. Exit code 0 if all
agree, 1 if not, 2 (and one line) where the kernel cannot run.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.block_scaled_matmul import reference
from pallas_kernels.block_scaled_matmul.api import grouped_block_scaled_matmul
from pallas_kernels.block_scaled_matmul.device import require_sm100
from pallas_kernels.containers import Quantized
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat

Product = Callable[[Quantized, Quantized, Array], Array]

GROUP_SIZES = (130, 0, 150, 1)
"""A group of two tiles, an empty one, one that starts in the middle of a tile, one row; the other rows belong to none."""

ROWS, FEATURES, SIZE = 300, 136, 1056
"""None is a multiple of a tile; five steps go around the ring of buffers."""

_ONE = {"e4m3": 0x38, "e8m0": 127}
_SCALES = {"e4m3": (0x30, 0x48), "e8m0": (124, 131)}
_CODE_ONE = 0x22


def cases(fmt: BlockFormat) -> Iterator[tuple[str, Quantized, Quantized]]:
    """(what varies, rows, weights), from constants to everything at random."""
    rng = np.random.default_rng(100)

    def operands(name: str, codes: bool = False, along: str = "", multipliers: bool = False) -> tuple[str, Quantized, Quantized]:
        x = _operand(rng, (ROWS,), fmt, codes, along, multipliers)
        return name, x, _operand(rng, (len(GROUP_SIZES), FEATURES), fmt, codes, along, multipliers)

    yield operands("nothing (codes, scales and multipliers are one)")
    yield operands("the codes", codes=True)
    yield operands("the scales along the rows", along="rows")
    yield operands("the scales along K", along="blocks")
    yield operands("codes and scales", codes=True, along="rows and blocks")
    if fmt.has_multiplier:
        yield operands("codes, scales and multipliers", codes=True, along="rows and blocks", multipliers=True)


def excess(product: Product, x: Quantized, weights: Quantized, expected: Float[np.ndarray, "N F"]) -> float:
    """Largest difference over its bound: a unit of bfloat16, and 2^-12 of the sum of magnitudes for the tensor core's own sum."""
    sizes = jnp.asarray(GROUP_SIZES, jnp.int32)
    actual = _wide(product(x, weights, sizes))
    magnitude = _wide(reference.grouped_block_scaled_matmul(_unsigned(x), _unsigned(weights), sizes))
    difference = np.abs(actual - expected) / (2.0**-7 * np.abs(expected) + 2.0**-12 * magnitude + 1e-30)
    return float(np.max(np.where(np.isfinite(actual), difference, np.inf)))


def run(product: Product, report: Callable[[str], None] = print) -> bool:
    """Whether the product agrees with the reference in all cases, and the control does not."""
    sizes = jnp.asarray(GROUP_SIZES, jnp.int32)
    good = True
    for fmt in (NVFP4, MXFP4):
        for name, x, weights in cases(fmt):
            expected = _wide(reference.grouped_block_scaled_matmul(x, weights, sizes))
            error = excess(product, x, weights, expected)
            good &= error <= 1
            report(f"{fmt.name}: varying {name}: {error:.2g} of the bound, {'ok' if error <= 1 else 'WRONG'}")
        shifted = dataclasses.replace(weights, scales=jnp.roll(weights.scales, 1, axis=-1))
        error = excess(product, x, shifted, expected)
        good &= error > 10
        report(f"{fmt.name}: control, scales shifted by a block: {error:.2g} of the bound, {'seen' if error > 10 else 'NOT SEEN'}")
    return good


def main() -> int:
    """Runs the kernel; the exit code is in the description of the module."""
    try:
        require_sm100()
    except NotImplementedError as error:
        print(error)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: the kernel was released without having run anywhere")
    return 0 if run(lambda x, weights, sizes: grouped_block_scaled_matmul(x, weights, sizes, implementation="pallas")) else 1


def _operand(rng: np.random.Generator, lead: tuple[int, ...], fmt: BlockFormat, codes: bool, along: str, multipliers: bool) -> Quantized:
    packed = np.full((*lead, SIZE // 2), _CODE_ONE, np.uint8)
    if codes:
        packed = rng.integers(0, 256, size=packed.shape, dtype=np.uint8)
    shape = (*(lead if "rows" in along else (1,) * len(lead)), SIZE // fmt.block if "blocks" in along else 1)
    scales = rng.integers(*_SCALES[fmt.scale], size=shape, dtype=np.uint8) if along else np.full(shape, _ONE[fmt.scale], np.uint8)
    multiplier = jnp.ones((), jnp.float32) if fmt.has_multiplier else None
    if multipliers:
        multiplier = jnp.asarray(rng.uniform(1e-4, 1e-3, size=(*lead[:1], *(1,) * (len(lead) - 1))), jnp.float32)
    return Quantized(
        codes=jnp.asarray(packed),
        scales=jnp.asarray(np.ascontiguousarray(np.broadcast_to(scales, (*lead, SIZE // fmt.block)))),
        multiplier=multiplier,
        size=SIZE,
        fmt=fmt,
    )


def _unsigned(q: Quantized) -> Quantized:
    return dataclasses.replace(q, codes=q.codes & jnp.uint8(0x77))


def _wide(values: Float[Array, "N F"]) -> Float[np.ndarray, "N F"]:
    return np.asarray(values).astype(np.float64)


if __name__ == "__main__":
    sys.exit(main())
