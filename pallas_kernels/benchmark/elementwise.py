"""The ops that round or unpack every value on its own: bound by memory."""

import functools
import importlib.util
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.benchmark.cases import Case, Peer, Setting, against_reference
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.containers import Guide, Quantized
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.packing import mantissa_bits
from pallas_kernels.quantize.api import quantize
from pallas_kernels.rms_norm_fake_quant.api import rms_norm_fake_quant
from pallas_kernels.rms_norm_fake_quant.rule import inverse_rms, rms_norm
from pallas_kernels.shapes import ACTIVATIONS, SMALL, WEIGHTS
from pallas_kernels.swiglu_fake_quant.api import swiglu_fake_quant
from pallas_kernels.swiglu_fake_quant.rule import swiglu

TARGETS = {"quantize": 0.80, "dequantize": 0.80, "fake_quant": 0.92, "guided_fake_quant": 0.88}
"""Share of the copy's bandwidth that a compiled kernel should reach."""

FUSED = ("rms_norm_fake_quant", "swiglu_fake_quant")
"""The ops of `fused`."""

_UNFUSED = "unfused pair"
_EPS = 1e-6


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The rows of one of the ops, for both formats."""
    # Records exist for activations only.
    large = ACTIVATIONS if op == "guided_fake_quant" else (*ACTIVATIONS, *WEIGHTS)
    triton = ("triton",) if setting.on_gpu and importlib.util.find_spec("jax_triton") else ()
    shapes = SMALL if setting.small else large if setting.on_gpu else ACTIVATIONS
    for fmt in (NVFP4, MXFP4):
        for name, shape in shapes:
            x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
            multiplier = _multiplier(fmt)
            q = quantize(x, fmt, multiplier)
            calls = {
                implementation: _call(op, fmt, implementation, x, multiplier, q) for implementation in (*setting.implementations, *triton)
            }
            text = f"{name}: {'x'.join(map(str, shape))}"
            yield from against_reference(f"{op}/{fmt.name}", text, calls, _moved(op, x, q), target=Target("share", TARGETS[op]))


def fused(op: str, setting: Setting) -> Iterator[Case]:
    """The rows of an op that rounds what another one makes; its peer is the other one in jnp, and then our own rounding."""
    for fmt in (NVFP4, MXFP4):
        for name, shape in SMALL if setting.small else ACTIVATIONS:
            x, weight = (jax.random.normal(jax.random.key(seed), size, jnp.bfloat16) for seed, size in enumerate((shape, shape[-1:])))
            text = f"{name}: {'x'.join(map(str, shape))}"
            guide = _guide(x, quantize(x, fmt, _multiplier(fmt)))
            variants = {"": (None, 0), "/guided": (guide, _bytes(guide))} if op == "rms_norm_fake_quant" else {"": (None, x.nbytes)}
            for variant, (guide, more) in variants.items():
                arguments = (x, weight if op == "rms_norm_fake_quant" else x[::-1], _multiplier(fmt), guide)
                whole, pair = _fused_call(op, fmt), Peer(_UNFUSED, Call(_unfused_call(op, fmt), arguments))
                for implementation in setting.implementations:
                    call = Call(functools.partial(whole, implementation=implementation), arguments)
                    target = None if implementation == "reference" else Target("ratio", 1.0, _UNFUSED)
                    yield Case(f"{op}/{fmt.name}{variant}", implementation, text, call, 2 * x.nbytes + more, None, (pair,), target)


def _fused_call(op: str, fmt: BlockFormat) -> Callable[..., Array]:
    if op == "swiglu_fake_quant":
        return lambda gate, up, multiplier, _, implementation: swiglu_fake_quant(gate, up, fmt, multiplier, implementation=implementation)
    return lambda x, weight, multiplier, guide, implementation: rms_norm_fake_quant(
        x, weight, _EPS, fmt, multiplier, guide, implementation=implementation
    )


def _unfused_call(op: str, fmt: BlockFormat) -> Callable[..., Array]:
    def call(x, other, multiplier, guide):
        made = swiglu(x, other) if op == "swiglu_fake_quant" else rms_norm(x, other, inverse_rms(x, _EPS))
        return fake_quant(made, fmt, multiplier) if guide is None else guided_fake_quant(made, guide, fmt, multiplier)

    return call


def _multiplier(fmt: BlockFormat) -> Array | None:
    """Not plain, as the multipliers of weights and activations are."""
    return jnp.float32(2.0**-9 * (1 + 2.0**-17)) if fmt.has_multiplier else None


def _bytes(arrays: Guide) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _call(op: str, fmt: BlockFormat, implementation: str, x: Array, multiplier: Array | None, q: Quantized) -> Call:
    if op == "dequantize":
        return Call(lambda q: dequantize(q, implementation=implementation), (q,))
    if op == "guided_fake_quant":
        return Call(
            lambda x, guide, multiplier: guided_fake_quant(x, guide, fmt, multiplier, implementation=implementation),
            (x, _guide(x, q), multiplier),
        )
    function = {"quantize": quantize, "fake_quant": fake_quant}[op]
    return Call(lambda x, multiplier: function(x, fmt, multiplier, implementation=implementation), (x, multiplier))


def _guide(x: Array, q: Quantized) -> Guide:
    return Guide("mantissa", mantissa_bits(q.codes, x.shape[-1]), q.scales, None, jnp.ones(x.shape[:-1], bool))


def _moved(op: str, x: Array, q: Quantized) -> int:
    if op in ("quantize", "dequantize"):
        return x.nbytes + q.codes.nbytes + q.scales.nbytes
    record = _bytes(_guide(x, q)) if op == "guided_fake_quant" else 0
    return 2 * x.nbytes + record
