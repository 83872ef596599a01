"""The rotation as a source of the rounding kernels: the halves of a head meet in registers, and only the rounded values are written.

Both values of a pair are needed twice, by the group of the one and by that of the other; the second time the cache has them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.arithmetic import nearest_bf16
from pallas_kernels.fake_quant import pallas as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, octets, plan
from pallas_kernels.guided_fake_quant import pallas as guided
from pallas_kernels.rope_fake_quant.rule import turned
from pallas_kernels.sources import Source, join_halves, require_bfloat16, split_halves


def rotated(
    x: BFloat16[Array, "*tokens heads head_dim"], cos: Float[Array, "*tokens half"], sin: Float[Array, "*tokens half"], groups: Groups
) -> Source:
    """The rotated heads of x."""
    heads, half = x.shape[-2], x.shape[-1] // 2
    tile = groups.from_last(x, groups.fmt.block)

    def read(tiles, whole):
        x_ref, *table_refs = whole
        parts = []
        for octet in octets(tiles[0]):
            row, column = groups.places(octet)
            second = column >= half
            other = groups.octet_at(x_ref, row * (2 * half) + jnp.where(second, column - half, column + half))
            place = jax.lax.div(row, heads) * half + jnp.where(second, column - half, column)
            parts.append((tiles[0][:, octet], other, second, [groups.octet_at(ref, place) for ref in table_refs]))
        return parts

    def values(parts):
        out = []
        for own, other, second, (cos_high, cos_low, sin_high, sin_low) in parts:
            sin = join_halves(sin_high, sin_low)
            sin = jnp.where(second[:, None], sin, -sin)
            out.append(nearest_bf16(turned(own.astype(jnp.float32), other.astype(jnp.float32), join_halves(cos_high, cos_low), sin)))
        return out

    tables = (*split_halves(cos.reshape(-1)), *split_halves(sin.reshape(-1)))
    return Source((tile,), (tile.reshape(-1), *tables), read, values, x.dtype)


@functools.partial(jax.jit, static_argnames=("kind", "fmt", "interpret"))
def rope_fake_quant(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
    rounding: tuple[Any, ...],
    kind: str | None,
    fmt: BlockFormat,
    interpret: bool | None = None,
) -> Float[Array, "*tokens heads head_dim"]:
    """The rounded rotation, as the reference.

    Raises NotImplementedError (see `groups.plan`), also for x that is not bfloat16, and for heads that are no whole blocks or whose halves
    are no whole octets.
    """
    require_bfloat16(x)
    if x.shape[-1] % fmt.block or x.shape[-1] % 16:
        raise NotImplementedError(f"the kernel turns heads of whole blocks and octets, not of {x.shape[-1]} values")
    groups = plan(x.shape, fmt, interpret)
    source = rotated(x, cos, sin, groups)
    return nearest.rounded(source, groups, *rounding) if kind is None else guided.rounded(source, groups, kind, *rounding)
