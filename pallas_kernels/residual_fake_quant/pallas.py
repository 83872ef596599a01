"""Both roundings as one Pallas kernel: x comes from memory once.

1. A program has whole rows. It rounds their blocks and writes the values, and each block's scale byte beside them.
2. It waits for its threads. Then they read the chosen channels of these rows again, and the scale bytes, which the cache still has.
3. Value and scale give the residual; it is rounded in blocks of its own.

Rows, blocks and channels come in any number, tiles in powers of two: what is too much of a tile does the last group once more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels import reciprocal, tilings
from pallas_kernels.arithmetic import (
    bits_float,
    decode_terms,
    encode_block,
    encode_gain,
    encode_terms,
    float_bits,
    magnitude_bits,
    nearest_bf16,
    signed_value,
    stored_value,
)
from pallas_kernels.blocks import pad_last
from pallas_kernels.formats import BlockFormat
from pallas_kernels.groups import block_amax, plan
from pallas_kernels.residual_fake_quant.rule import residual_multiplier
from pallas_kernels.sources import require_bfloat16

_INTERPRET_PROGRAMS = 16
_MOST_WARPS = 32


@dataclasses.dataclass(frozen=True)
class Share:
    """The groups of one of the two results that a program works on.

    Args:
      rows: of the tensor.
      blocks: groups of a row.
      each: rows of a program.
    """

    rows: int
    blocks: int
    each: int

    @property
    def tile(self) -> int:
        """Groups of a tile, a power of two."""
        return _power_of_two(self.each * self.blocks)

    def places(self) -> tuple[Int[Array, " n"], Int[Array, " n"], Int[Array, " n"]]:
        """Inside a body: (number, row, number within the row) of each group of the tile."""
        lane = jnp.minimum(jax.lax.broadcasted_iota(jnp.int32, (self.tile,), 0), self.each * self.blocks - 1)
        number = jnp.minimum(pl.program_id(0) * (self.each * self.blocks) + lane, self.rows * self.blocks - 1)
        return number, jax.lax.div(number, self.blocks), jax.lax.rem(number, self.blocks)


def _body(x_ref, channels_ref, *refs, first: Share, second: Share, channels: int, fmt: BlockFormat, interpret: bool):
    *multiplier_ref, out_ref, residual_ref, scales_ref = refs

    def multiplier_of(row):
        if not multiplier_ref:
            return None
        return (multiplier_ref[0][...] if multiplier_ref[0].shape[0] == 1 else multiplier_ref[0][row])[:, None]

    number, row, _ = first.places()
    octets = [_octet(number, start, fmt) for start in range(0, fmt.block, 8)]
    parts = [x_ref[octet].astype(jnp.float32) for octet in octets]
    scales = _store(out_ref, octets, parts, multiplier_of(row), fmt)  # 1
    scales_ref[number] = scales[:, 0].astype(jnp.uint8)
    if not interpret:
        pltriton.debug_barrier()  # 2
    number, row, column = second.places()
    multiplier = multiplier_of(row)
    left = []
    for start in range(0, fmt.block, 8):
        position = _octet(column, start, fmt)
        channel = channels_ref[position]
        x = x_ref[(row * (first.blocks * fmt.block))[:, None] + channel].astype(jnp.float32)
        scale = scales_ref[(row * first.blocks)[:, None] + jax.lax.div(channel, fmt.block)].astype(jnp.int32)
        part = nearest_bf16(x - _rounded(x, scale, multiplier, fmt))
        left.append(part if channels % fmt.block == 0 else jnp.where(position < channels, part, 0.0))
    octets = [_octet(number, start, fmt) for start in range(0, fmt.block, 8)]
    _store(residual_ref, octets, left, None if multiplier is None else residual_multiplier(multiplier), fmt)  # 3


def _octet(number: Int[Array, " n"], start: int, fmt: BlockFormat) -> Int[Array, "n 8"]:
    """Where eight values of each group lie."""
    return (number * fmt.block + start)[:, None] + jax.lax.broadcasted_iota(jnp.int32, (1, 8), 1)


def _store(
    ref: jax.Ref,
    octets: list[Int[Array, "n 8"]],
    parts: list[Float[Array, "n 8"]],
    multiplier: Float[Array, "#n 1"] | None,
    fmt: BlockFormat,
) -> Int[Array, "n 1"]:
    """Writes the rounded values of each group, and returns the scale bytes."""
    magnitudes = [magnitude_bits(part) for part in parts]
    scales, gain, step = encode_block(block_amax(magnitudes), multiplier)
    factor, pre = decode_terms(scales, multiplier)
    for octet, part, magnitude in zip(octets, parts, magnitudes, strict=True):
        value = reciprocal.nearest_value(bits_float(magnitude) * gain, step, fmt)
        ref[octet] = stored_value(value, float_bits(part), factor, pre, ref.dtype)
    return scales


def _rounded(
    x: Float[Array, "n 8"], scales: Int[Array, "n 8"], multiplier: Float[Array, "#n 1"] | None, fmt: BlockFormat
) -> Float[Array, "n 8"]:
    """Values of different blocks rounded under the scales of those. Not through a cast, which a compiler may drop before a difference."""
    gain, step = encode_terms(scales, None if multiplier is None else encode_gain(multiplier))
    value = reciprocal.nearest_value(bits_float(magnitude_bits(x)) * gain, step, fmt)
    return signed_value(value, float_bits(x), *decode_terms(scales, multiplier))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.partial(jax.jit, static_argnames=("fmt", "interpret", "tile", "warps"))
def residual_fake_quant(
    x: BFloat16[Array, "*rows d"],
    channels: Int[Array, " c"],
    multiplier: Float[Array, "*#rows"] | None,
    fmt: BlockFormat,
    interpret: bool | None = None,
    tile: int | None = None,
    warps: int | None = None,
) -> tuple[BFloat16[Array, "*rows d"], BFloat16[Array, "*rows c"]]:
    """Q(x) and Q(R), as the reference.

    Raises NotImplementedError (see `groups.plan`), also for x that is not bfloat16 and for rows that no program can hold.
    """
    require_bfloat16(x)
    groups = plan(x.shape, fmt, interpret)
    sizes = tilings.lookup("residual_fake_quant")
    tile, warps = tile or sizes["tile"], warps or sizes["num_warps"]
    rows, count = groups.count // groups.blocks, channels.shape[0]
    each = -(-rows // _INTERPRET_PROGRAMS) if groups.interpret else max(tile // groups.blocks, 1)
    first, second = (Share(rows, blocks, each) for blocks in (groups.blocks, fmt.scales_bytes(count)))
    warps = max(warps * first.tile // tile, 1)
    if not groups.interpret and warps > _MOST_WARPS:
        raise NotImplementedError(
            f"the kernel keeps a row in one program, and one of {groups.size} values is too long; split x, or take None"
        )
    shapes = [((rows * share.blocks * fmt.block,), x.dtype) for share in (first, second)] + [((rows * first.blocks,), jnp.uint8)]
    inputs = [pad_last(x, first.blocks * fmt.block).reshape(-1), pad_last(channels, second.blocks * fmt.block)]
    if multiplier is not None:
        inputs.append(groups.row_values(multiplier))
    out, residual, _ = pl.pallas_call(
        functools.partial(_body, first=first, second=second, channels=count, fmt=fmt, interpret=groups.interpret),
        grid=(-(-rows // each),),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        compiler_params=pltriton.CompilerParams(num_warps=warps),
        interpret=groups.interpret,
    )(*inputs)
    lengths = ((out, groups.size), (residual, count))
    return tuple(flat.reshape((*groups.rows, -1))[..., :length] for flat, length in lengths)
