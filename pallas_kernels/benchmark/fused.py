"""The ops that round together with what comes before or after: bound by memory, and timed against the parts one after the other."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark.cases import Case, Peer, Setting
from pallas_kernels.benchmark.elementwise import bytes_of, record_of, static_multiplier
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.containers import Guide
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.quantize.api import quantize
from pallas_kernels.residual_fake_quant.api import residual_fake_quant
from pallas_kernels.residual_fake_quant.rule import residual, residual_multiplier
from pallas_kernels.rms_norm_fake_quant.api import rms_norm_fake_quant
from pallas_kernels.rms_norm_fake_quant.rule import inverse_rms, rms_norm
from pallas_kernels.rope_fake_quant.api import rope_fake_quant
from pallas_kernels.rope_fake_quant.rule import rope_tables, rotate
from pallas_kernels.shapes import ACTIVATIONS, KEYS, SMALL
from pallas_kernels.swiglu_fake_quant.api import swiglu_fake_quant
from pallas_kernels.swiglu_fake_quant.rule import swiglu

_UNFUSED = "unfused pair"
_EPS, _THETA = 1e-6, 1e6


class Problem(NamedTuple):
    """An op at a shape.

    Args:
      arguments: of both calls.
      fused: takes them and `implementation`.
      unfused: the parts in jnp, the rounding by the kernel.
      bytes: every input and result once.
    """

    arguments: tuple[Any, ...]
    fused: Callable[..., Any]
    unfused: Callable[..., Any]
    bytes: int


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The rows of an op, for both formats; its peer is the parts one after the other."""
    make = FUSED[op]
    large = KEYS if op == "rope_fake_quant" else ACTIVATIONS
    for fmt in (NVFP4, MXFP4):
        for name, shape in SMALL if setting.small else large:
            x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
            variants: dict[str, Guide | None] = {"": None}
            if op in _GUIDED:
                variants["/guided"] = record_of(x, quantize(x, fmt, static_multiplier(fmt)))
            for variant, guide in variants.items():
                problem = make(x, fmt, guide)
                peer = Peer(_UNFUSED, Call(problem.unfused, problem.arguments))
                text = f"{name}: {'x'.join(map(str, shape))}"
                for implementation in setting.implementations:
                    call = Call(functools.partial(problem.fused, implementation=implementation), problem.arguments)
                    target = None if implementation == "reference" else Target("ratio", 1.0, _UNFUSED)
                    yield Case(f"{op}/{fmt.name}{variant}", implementation, text, call, problem.bytes, None, (peer,), target)


def _rounded(x: jax.Array, fmt: BlockFormat, multiplier: jax.Array | None, guide: Guide | None) -> jax.Array:
    return fake_quant(x, fmt, multiplier) if guide is None else guided_fake_quant(x, guide, fmt, multiplier)


def _norm(x: jax.Array, fmt: BlockFormat, guide: Guide | None) -> Problem:
    weight = jax.random.normal(jax.random.key(1), x.shape[-1:], jnp.bfloat16)

    def fused(x, weight, multiplier, guide, implementation):
        return rms_norm_fake_quant(x, weight, _EPS, fmt, multiplier, guide, implementation=implementation)

    def unfused(x, weight, multiplier, guide):
        return _rounded(rms_norm(x, weight, inverse_rms(x, _EPS)), fmt, multiplier, guide)

    return Problem((x, weight, static_multiplier(fmt), guide), fused, unfused, 2 * x.nbytes + bytes_of(guide))


def _swiglu(x: jax.Array, fmt: BlockFormat, guide: Guide | None) -> Problem:
    def fused(gate, up, multiplier, implementation):
        return swiglu_fake_quant(gate, up, fmt, multiplier, implementation=implementation)

    def unfused(gate, up, multiplier):
        return fake_quant(swiglu(gate, up), fmt, multiplier)

    return Problem((x, x[::-1], static_multiplier(fmt)), fused, unfused, 3 * x.nbytes)


def _rope(x: jax.Array, fmt: BlockFormat, guide: Guide | None) -> Problem:
    shape = x.shape
    if x.ndim == 2:  # a toy shape has one head
        x = x[:, None]
        guide = jax.tree.map(lambda each: each[:, None], guide)
    tables = rope_tables(jnp.arange(shape[0], dtype=jnp.int32), shape[-1], _THETA)

    def fused(x, cos, sin, multiplier, guide, implementation):
        return rope_fake_quant(x, cos, sin, fmt, multiplier, guide, implementation=implementation)

    def unfused(x, cos, sin, multiplier, guide):
        return _rounded(rotate(x, cos, sin), fmt, multiplier, guide)

    return Problem((x, *tables, static_multiplier(fmt), guide), fused, unfused, 2 * x.nbytes + bytes_of(tables) + bytes_of(guide))


def _residual(x: jax.Array, fmt: BlockFormat, guide: Guide | None) -> Problem:
    """Half of the channels, one by one."""
    size = x.shape[-1]
    channels = jnp.sort(jax.random.permutation(jax.random.key(1), size)[: size // 2]).astype(jnp.int32)

    def fused(x, channels, multiplier, implementation):
        return residual_fake_quant(x, channels, fmt, multiplier, implementation=implementation)

    def unfused(x, channels, multiplier):
        first = fake_quant(x, fmt, multiplier)
        left = jnp.take(residual(x, first), channels, axis=-1, mode="clip")
        return first, fake_quant(left, fmt, None if multiplier is None else residual_multiplier(multiplier))

    return Problem((x, channels, static_multiplier(fmt)), fused, unfused, 2 * x.nbytes + x.nbytes // 2)


FUSED: dict[str, Callable[[jax.Array, BlockFormat, Guide | None], Problem]] = {
    "rms_norm_fake_quant": _norm,
    "swiglu_fake_quant": _swiglu,
    "rope_fake_quant": _rope,
    "residual_fake_quant": _residual,
}
"""Op -> how its problem is made from an array, for a format, and for a record if it is guided."""

_GUIDED = ("rms_norm_fake_quant", "rope_fake_quant")
