"""The norm as a source of the rounding kernels: x is read once, and only the rounded values are written."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import flushed, nearest_bf16
from pallas_kernels.blocks import pad_last
from pallas_kernels.fake_quant import pallas as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, octets, plan
from pallas_kernels.guided_fake_quant import pallas as guided
from pallas_kernels.rms_norm_fake_quant.rule import scaled
from pallas_kernels.sources import Source, join_halves, require_bfloat16, split_halves


def normalized(x: Float[Array, "*rows d"], weight: Float[Array, " d"], inverse_rms: Float[Array, "*rows 1"], groups: Groups) -> Source:
    """x normalised."""

    def read(tiles, whole):
        high_ref, low_ref, inverse_ref = whole
        slices = octets(groups.fmt.block)
        parts = [groups.load(tiles[0], octet) for octet in slices]
        halves = [(groups.of_columns(high_ref, octet), groups.of_columns(low_ref, octet)) for octet in slices]
        return parts, halves, groups.of_rows(inverse_ref)[:, None]

    def values(loaded):
        parts, halves, inverse = loaded
        scaled_parts = [scaled(part.astype(jnp.float32), inverse, join_halves(*half)) for part, half in zip(parts, halves, strict=True)]
        return [[nearest_bf16(part) for part in scaled_parts]]

    whole = (
        *split_halves(pad_last(flushed(weight.astype(jnp.float32)), groups.blocks * groups.fmt.block)),
        groups.row_values(inverse_rms[..., 0]),
    )
    return Source((groups.from_last(x, groups.fmt.block),), whole, read, values, x.dtype)


@functools.partial(jax.jit, static_argnames=("kind", "fmt", "interpret"))
def rms_norm_fake_quant(
    x: Float[Array, "*rows d"],
    weight: Float[Array, " d"],
    inverse_rms: Float[Array, "*rows 1"],
    rounding: tuple[Any, ...],
    kind: str | None,
    fmt: BlockFormat,
    interpret: bool | None = None,
) -> Float[Array, "*rows d"]:
    """The rounded norm, as the reference. Raises NotImplementedError (see `groups.plan`), also for x that is not bfloat16."""
    require_bfloat16(x)
    groups = plan(x.shape, fmt, interpret)
    source = normalized(x, weight, inverse_rms, groups)
    return nearest.rounded(source, groups, *rounding) if kind is None else guided.rounded(source, groups, kind, *rounding)
