"""SwiGLU as a source of the rounding kernel: both projections are read once, and only the rounded values are written."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.arithmetic import nearest_bf16
from pallas_kernels.fake_quant.pallas import rounded
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, octets, plan
from pallas_kernels.sources import Source
from pallas_kernels.swiglu_fake_quant.rule import gated


def activated(gate: BFloat16[Array, "*rows d"], up: BFloat16[Array, "*rows d"], groups: Groups) -> Source:
    """The SwiGLU of two projections."""

    def read(tiles, whole):
        return [[groups.load(ref, octet) for ref in tiles] for octet in octets(groups.fmt.block)]

    def values(pairs):
        return [[nearest_bf16(gated(*(part.astype(jnp.float32) for part in pair))) for pair in pairs]]

    return Source(tuple(groups.from_last(x, groups.fmt.block) for x in (gate, up)), (), read, values, gate.dtype)


@functools.partial(jax.jit, static_argnames=("fmt", "interpret"))
def swiglu_fake_quant(
    gate: BFloat16[Array, "*rows d"],
    up: BFloat16[Array, "*rows d"],
    multiplier: Float[Array, "*#rows"] | None,
    fmt: BlockFormat,
    interpret: bool | None = None,
) -> BFloat16[Array, "*rows d"]:
    """The rounded SwiGLU, as the reference. Raises NotImplementedError (see `groups.plan`)."""
    groups = plan(gate.shape, fmt, interpret)
    return rounded(activated(gate, up, groups), groups, multiplier)
