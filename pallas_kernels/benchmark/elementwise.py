"""The ops that round or unpack every value on its own: bound by memory."""

import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from pallas_kernels.benchmark.cases import Case, Setting, against_reference
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.containers import Guide, Quantized
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.packing import mantissa_bits
from pallas_kernels.quantize.api import quantize
from pallas_kernels.shapes import ACTIVATIONS, SMALL, WEIGHTS

TARGETS = {"quantize": 0.80, "dequantize": 0.80, "fake_quant": 0.92, "guided_fake_quant": 0.88}
"""Share of the copy's bandwidth that a compiled kernel should reach."""


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The rows of one of the ops, for both formats."""
    # Records exist for activations only.
    large = ACTIVATIONS if op == "guided_fake_quant" else (*ACTIVATIONS, *WEIGHTS)
    triton = ("triton",) if setting.on_gpu and importlib.util.find_spec("jax_triton") else ()
    shapes = SMALL if setting.small else large if setting.on_gpu else ACTIVATIONS
    for fmt in (NVFP4, MXFP4):
        for name, shape in shapes:
            x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
            multiplier = static_multiplier(fmt)
            q = quantize(x, fmt, multiplier)
            calls = {
                implementation: _call(op, fmt, implementation, x, multiplier, q) for implementation in (*setting.implementations, *triton)
            }
            text = f"{name}: {'x'.join(map(str, shape))}"
            yield from against_reference(f"{op}/{fmt.name}", text, calls, _moved(op, x, q), target=Target("share", TARGETS[op]))


def static_multiplier(fmt: BlockFormat) -> Array | None:
    """A decode multiplier; not plain, as the multipliers of weights and activations are."""
    return jnp.float32(2.0**-9 * (1 + 2.0**-17)) if fmt.has_multiplier else None


def bytes_of(arrays: PyTree[Array]) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _call(op: str, fmt: BlockFormat, implementation: str, x: Array, multiplier: Array | None, q: Quantized) -> Call:
    if op == "dequantize":
        return Call(lambda q: dequantize(q, implementation=implementation), (q,))
    if op == "guided_fake_quant":
        return Call(
            lambda x, guide, multiplier: guided_fake_quant(x, guide, fmt, multiplier, implementation=implementation),
            (x, record_of(x, q), multiplier),
        )
    function = {"quantize": quantize, "fake_quant": fake_quant}[op]
    return Call(lambda x, multiplier: function(x, fmt, multiplier, implementation=implementation), (x, multiplier))


def record_of(x: Array, q: Quantized) -> Guide:
    """A mantissa record of every row of x."""
    return Guide("mantissa", mantissa_bits(q.codes, x.shape[-1]), q.scales, None, jnp.ones(x.shape[:-1], bool))


def _moved(op: str, x: Array, q: Quantized) -> int:
    if op in ("quantize", "dequantize"):
        return x.nbytes + q.codes.nbytes + q.scales.nbytes
    record = bytes_of(record_of(x, q)) if op == "guided_fake_quant" else 0
    return 2 * x.nbytes + record
