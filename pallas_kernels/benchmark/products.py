"""The products: grouped ones with their gradients, and those with FP4 weights.

Rows are divided between the groups as by a random router, unevenly. Matrices of groups without a row need not be read.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.benchmark import peers
from pallas_kernels.benchmark.cases import Case, Peer, Setting, against_reference
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.containers import Quantized
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.grouped_matmul import pallas, reference
from pallas_kernels.grouped_matmul_w4.api import grouped_matmul_w4a16, matmul_w4
from pallas_kernels.grouped_matmul_w4.layout import W4Weights, prepare_w4
from pallas_kernels.multiplier import tensor_multiplier
from pallas_kernels.quantize.api import quantize
from pallas_kernels.shapes import GROUPED, GROUPED_W4, SINGLE_W4, SMALL_GROUPED, SMALL_GROUPED_W4, SMALL_SINGLE_W4, ProductShape

_TERAFLOPS = {"forward": 350.0, "grad_x": 230.0, "grad_weights": 230.0}
_MODULES = {"reference": reference, "pallas": pallas}
_JUDGED_ROWS = 512
"""Rows for which the FP4 product has a target against the BF16 one."""


def grouped(setting: Setting) -> Iterator[Case]:
    """`grouped_matmul`: the product and those of its two gradients."""
    for shape in SMALL_GROUPED if setting.toy else GROUPED:
        x, weights = _normal(0, shape.rows, shape.size), _normal(1, shape.groups, shape.features, shape.size)
        cotangent, sizes = _normal(2, shape.rows, shape.features), _group_sizes(shape)
        # Every product reads two of the three tensors and writes one of the size of the third.
        moved = x.nbytes + cotangent.nbytes + _touched(weights.nbytes, sizes)
        for product, target in _TERAFLOPS.items():
            left, right = (x, weights) if product == "forward" else (cotangent, weights) if product == "grad_x" else (cotangent, x)
            calls = {name: Call(getattr(_MODULES[name], product), (left, right, sizes)) for name in setting.implementations}
            rivals = () if setting.toy else peers.ragged_products(product, left, right, sizes)
            yield from _rows(setting, f"grouped_matmul/{product}", shape, calls, moved, rivals=rivals, target=Target("teraflops", target))


def grouped_w4(setting: Setting) -> Iterator[Case]:
    """`grouped_matmul_w4a16`, also with activations that are rounded first (`/w4a4`)."""
    for fmt, shapes in _formats_and_shapes(setting, SMALL_GROUPED_W4, GROUPED_W4):
        for shape in shapes:
            x, q = _normal(0, shape.rows, shape.size), _weights(fmt, shape.groups, shape.features, shape.size)
            sizes = _group_sizes(shape)
            moved = x.nbytes + _touched(_packed_bytes(q), sizes) + 2 * shape.rows * shape.features
            rivals = () if setting.toy else _bf16_grouped(x, q, sizes)
            yield from _w4(setting, grouped_matmul_w4a16, f"grouped_matmul_w4a16/{fmt.name}", shape, x, q, (sizes,), moved, rivals)


def single_w4(setting: Setting) -> Iterator[Case]:
    """`matmul_w4`, in the same two ways."""
    for fmt, shapes in _formats_and_shapes(setting, SMALL_SINGLE_W4, SINGLE_W4):
        for shape in shapes:
            x, q = _normal(0, shape.rows, shape.size), _weights(fmt, shape.features, shape.size)
            moved = x.nbytes + _packed_bytes(q) + 2 * shape.rows * shape.features
            rivals = () if setting.toy else (Peer("bf16 jnp.matmul", Call(lambda x, w: x @ w.T, (x, dequantize(q)))),)
            yield from _w4(setting, matmul_w4, f"matmul_w4/{fmt.name}", shape, x, q, (), moved, rivals)


def _w4(setting, function, op, shape, x, q, sizes, moved, rivals) -> Iterator[Case]:
    """The rows with BF16 and with rounded activations."""
    weights: dict[str, Quantized | W4Weights] = {"reference": q}
    if "pallas" in setting.implementations:
        weights["pallas"] = prepare_w4(q)
    calls = {name: Call(functools.partial(function, implementation=name), (x, weights[name], *sizes)) for name in setting.implementations}
    judged = op.startswith("grouped") and shape.rows == _JUDGED_ROWS
    target = Target("ratio", 0.50, peers.TOKAMAX) if judged else None
    yield from _rows(setting, f"{op}/w4a16", shape, calls, moved, rivals=rivals, target=target)

    def rounded(name: str) -> Call:
        def product(x, weights, multiplier, *sizes):
            return function(x, weights, *sizes, activations=q.fmt, activation_multiplier=multiplier, implementation=name)

        return Call(product, (x, weights[name], tensor_multiplier(x) if q.fmt.has_multiplier else None, *sizes))

    rivals = () if setting.toy else (Peer("our own w4a16", calls["pallas"]),)
    rounded_calls = {name: rounded(name) for name in setting.implementations}
    yield from _rows(setting, f"{op}/w4a4", shape, rounded_calls, moved, rivals=rivals, target=Target("ratio", 1.15))


def _rows(setting, op, shape, calls, moved, rivals, target) -> Iterator[Case]:
    """At toy shapes our implementations against each other; at real ones the kernel against its peers.

    The reference of a real grouped product expands the rows once for every group and does not fit a device.
    """
    text = f"{shape.name}: {shape.rows} rows, {shape.groups}x{shape.features}x{shape.size}"
    flops = 2 * shape.rows * shape.features * shape.size
    if setting.toy:
        yield from against_reference(op, text, calls, moved, flops)
    else:
        yield Case(op, "pallas", text, calls["pallas"], moved, flops, tuple(rivals), target)


def _bf16_grouped(x: Float[Array, "N K"], q: Quantized, sizes: Int[Array, " E"]) -> tuple[Peer, ...]:
    """The product with BF16 weights: tokamax's, and where it is not installed ours."""
    weights = dequantize(q)
    return peers.ragged_products("forward", x, weights, sizes) or (
        Peer("our own bf16 grouped_matmul", Call(pallas.forward, (x, weights, sizes))),
    )


def _formats_and_shapes(
    setting: Setting, small: tuple[ProductShape, ...], large: tuple[ProductShape, ...]
) -> Iterator[tuple[BlockFormat, tuple[ProductShape, ...]]]:
    """Every shape in NVFP4; in MXFP4, whose kernel differs in the decoding of a scale only, the one with a target, and no toy one."""
    yield NVFP4, small if setting.toy else large
    yield MXFP4, () if setting.toy else tuple(shape for shape in large if shape.rows == _JUDGED_ROWS)


def _normal(seed: int, *shape: int) -> Float[Array, "*shape"]:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _weights(fmt: BlockFormat, *shape: int) -> Quantized:
    return quantize(_normal(1, *shape), fmt)


def _packed_bytes(q: Quantized) -> int:
    return q.codes.nbytes + q.scales.nbytes


def _group_sizes(shape: ProductShape) -> Int[Array, " E"]:
    draws = np.random.default_rng(0).multinomial(shape.rows, [1 / shape.groups] * shape.groups)
    return jnp.asarray(draws, jnp.int32)


def _touched(nbytes: int, sizes: Int[Array, " E"]) -> int:
    """The bytes of the matrices of groups that have rows."""
    return nbytes * int(jnp.count_nonzero(sizes)) // sizes.size
