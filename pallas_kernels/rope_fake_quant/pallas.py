"""The rotation as a source of the rounding kernels, which write only the rounded values.

A thread has the two blocks of a head that rotate with each other. So it reads every value, cosine and sine once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.arithmetic import nearest_bf16
from pallas_kernels.fake_quant import pallas as nearest
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import Groups, octets, plan
from pallas_kernels.guided_fake_quant import pallas as guided
from pallas_kernels.rope_fake_quant.rule import turned
from pallas_kernels.sources import Source, require_bfloat16


def rotated(
    x: BFloat16[Array, "*tokens heads head_dim"], cos: Float[Array, "*tokens half"], sin: Float[Array, "*tokens half"], groups: Groups
) -> Source:
    """The rotated heads of x, which the groups cut into halves."""
    heads, half = x.shape[-2], x.shape[-1] // 2

    def read(tiles, whole):
        loaded = []
        for octet in octets(groups.fmt.block):
            row, column = groups.places(octet)
            place = jax.lax.div(row, heads) * half + column
            pair = [groups.load(tiles[0], octet, part) for part in range(2)]
            loaded.append([*pair, *(groups.octet_at(table, place) for table in whole)])
        return loaded

    def values(loaded):
        blocks = [[], []]
        for first, second, cos, sin in loaded:
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            if groups.interpret:
                both = nearest_bf16(turned(first, second, cos, -sin)), nearest_bf16(turned(second, first, cos, sin))
            else:
                both = _turned("sub", first, second, cos, sin), _turned("add", second, first, cos, sin)
            for block, octet in zip(blocks, both, strict=True):
                block.append(octet)
        return blocks

    return Source((groups.from_last(x, groups.fmt.block),), (cos.reshape(-1), sin.reshape(-1)), read, values, x.dtype)


def _turned(
    operation: str, own: Float[Array, "n 8"], other: Float[Array, "n 8"], cos: Float[Array, "n 8"], sin: Float[Array, "n 8"]
) -> BFloat16[Array, "n 8"]:
    """`turned`, or its difference, rounded to bfloat16, in a third of the instructions: a GPU's sum can flush what it takes, and what it
    gives, which is exact where it is subnormal; and a cast takes two values.
    """
    lines = ["{", ".reg .f32 p, q, s<2>;"]
    for lane in range(2):
        x, y, c, s = (f"${1 + 2 * operand + lane}" for operand in range(4))
        lines += [f"mul.rn.f32 p, {x}, {c};", f"mul.rn.f32 q, {y}, {s};", f"{operation}.rn.ftz.f32 s{lane}, p, q;"]
    (out,) = pltriton.elementwise_inline_asm(
        "\n".join([*lines, "cvt.rn.bf16x2.f32 $0, s1, s0;", "}"]),
        args=[own, other, cos, sin],
        constraints=",".join(["=r"] + ["f"] * 8),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(own.shape, jnp.bfloat16)],
    )
    return out


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

    Raises NotImplementedError (see `groups.plan`), also for x that is not bfloat16, and for heads whose halves are not whole blocks.
    """
    require_bfloat16(x)
    groups = plan_halves(x.shape, fmt, interpret)
    source = rotated(x, cos, sin, groups)
    return nearest.rounded(source, groups, *rounding) if kind is None else guided.rounded(source, groups, kind, *rounding)


def plan_halves(shape: tuple[int, ...], fmt: BlockFormat, interpret: bool | None) -> Groups:
    """The groups of heads [*tokens, heads, head_dim]. Raises NotImplementedError as `rope_fake_quant` does."""
    if shape[-1] % (2 * fmt.block):
        raise NotImplementedError(
            f"the kernel turns a block of the first half of a head with one of the second, and halves of {shape[-1] // 2} values are not "
            f"whole blocks of {fmt.block} ({fmt.name}); take implementation='reference' or None"
        )
    return plan(shape, fmt, interpret, parts=2)
