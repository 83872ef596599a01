"""The order in which the kernel reads FP4 weights.

Here E experts, N output features, K the contraction axis. K is cut into chunks of 256, a chunk into 16 columns; a column is one block of
16 values with its scale. For every (expert, chunk) the kernel finds in memory, one after the other for its rows:

* words int32[E, K/256, 2, N, 16]: half h of row n and column c holds the codes 8h .. 8h+7 of the block;
* scales uint8[E, K/256, N, 16], the scale byte of the block.

Why not the plain order: a program then reads one contiguous stretch, a thread has whole blocks with their scale, and the
codes at place p of all columns form an operand of the tensor core as they are. Their product with the columns of x at the
same places is one of 16 products that are summed, so codes never have to be interleaved (`split_columns` puts x in that order).

Within 16 bits of a word four codes lie such that a shift by a constant brings each onto sign and low exponent of a bfloat16:

    place   sign   magnitude bits        shift
    0       15     8 7 6                 none
    1       12     5 4 3                 left 3
    2       9      2 1 0                 left 6
    3       14     13 11 10              the rest
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.arithmetic import bits_float, float_bits
from pallas_kernels.blocks import pad_last
from pallas_kernels.containers import Quantized
from pallas_kernels.formats import E4M3_NAN, E8M0_NAN, BlockFormat
from pallas_kernels.multiplier import align_multiplier
from pallas_kernels.packing import interleave_nibbles
from pallas_kernels.pytrees import register_arrays

COLUMNS, PLACES = 16, 16
CHUNK = COLUMNS * PLACES
ROWS = 64
"""The kernel works on whole groups of 64 rows."""

_NUDGE_BITS = 0x40


@register_arrays
@dataclasses.dataclass(frozen=True)
class W4Weights:
    """FP4 weights in the kernel's order, with N and K padded to whole tiles.

    Args:
      words: int32 codes.
      scales: uint8 scale bytes, one for 16 values in both formats.
      multiplier: float32 factor of each row; NaN for a row with a block that is not finite.
      rows: N of the tensor.
      size: K of the tensor.
      fmt: the format.
    """

    words: Int[Array, "E chunks 2 padded 16"]
    scales: UInt8[Array, "E chunks padded 16"]
    multiplier: Float[Array, "E padded"]
    rows: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    fmt: BlockFormat = dataclasses.field(metadata={"static": True})


def prepare_w4(q: Quantized) -> W4Weights:
    """Weights [E, N, K] (or [N, K], as one expert) in the kernel's order: once after loading, not per call.

    The bytes stay codes and scale bytes: 4.5 bits a weight. MXFP4 scales are stored twice, so that both formats have one for
    16 values. Powers of two with the project's nudge become plain again, as in `dequantize`.

    Raises:
      ValueError: q has no row axis or more than two leading axes.
    """
    if q.codes.ndim not in (2, 3):
        raise ValueError(f"weights need the axes [experts, rows, bytes] or [rows, bytes], got codes of shape {q.codes.shape}")
    rows = q.codes.shape[:-1]
    multiplier = None if q.multiplier is None else align_multiplier(q.multiplier, rows)
    lead = (1, *rows) if q.codes.ndim == 2 else rows
    factor = jnp.broadcast_to(jnp.ones((), jnp.float32) if multiplier is None else multiplier, rows).reshape(lead)
    return _prepare(q.codes.reshape(*lead, -1), q.scales.reshape(*lead, -1), factor, q.size, q.fmt)


@functools.partial(jax.jit, static_argnames=("size", "fmt"))
def _prepare(codes, scales, multiplier, size, fmt):
    experts, rows, _ = codes.shape
    chunks, padded = -(-size // CHUNK), -(-rows // ROWS) * ROWS
    scales = jnp.repeat(scales, fmt.block // 16, axis=2)
    multiplier = jnp.where(jnp.any(_not_a_scale(scales, fmt), axis=2), jnp.nan, _plain(multiplier))
    nibbles = _pad_rows(pad_last(interleave_nibbles(codes), chunks * CHUNK), padded)
    blocks = nibbles.reshape(experts, padded, chunks, COLUMNS, 2, 2, 4)
    words = _lane(blocks[..., 0, :]) | (_lane(blocks[..., 1, :]) << 16)
    return W4Weights(
        words=words.transpose(0, 2, 4, 1, 3),
        scales=_pad_rows(pad_last(scales, chunks * COLUMNS), padded).reshape(experts, padded, chunks, COLUMNS).transpose(0, 2, 1, 3),
        multiplier=jnp.pad(multiplier, ((0, 0), (0, padded - rows))),
        rows=rows,
        size=size,
        fmt=fmt,
    )


def split_columns(x: Float[Array, "M K"], chunks: int) -> Float[Array, "chunks places M columns"]:
    """x in the order of the codes: the 16 places of a block are 16 matrices, whose columns are the blocks of a chunk."""
    blocks = pad_last(x, chunks * CHUNK).reshape(x.shape[0], chunks, COLUMNS, PLACES)
    return blocks.transpose(1, 3, 0, 2)


def _lane(codes: Int[Array, "*s 4"]) -> Int[Array, "*s"]:
    """Four codes as 16 bits, in the places of the table above."""
    sign, magnitude = codes >> 3, codes & 7
    first, second, third = ((sign[..., j] << (15 - 3 * j)) | (magnitude[..., j] << (6 - 3 * j)) for j in range(3))
    last = (sign[..., 3] << 14) | ((magnitude[..., 3] & 4) << 11) | ((magnitude[..., 3] & 3) << 10)
    return first | second | third | last


def _not_a_scale(scales: UInt8[Array, "*s"], fmt: BlockFormat) -> Shaped[Array, "*s"]:
    return scales >= E4M3_NAN if fmt.scale == "e4m3" else scales == E8M0_NAN


def _plain(multiplier: Float[Array, "*s"]) -> Float[Array, "*s"]:
    bits = float_bits(multiplier)
    return bits_float(jnp.where((bits & 0x7FFFFF) == _NUDGE_BITS, bits & ~0x7FFFFF, bits))


def _pad_rows(values: Shaped[Array, "E N d"], rows: int) -> Shaped[Array, "E rows d"]:
    return jnp.pad(values, ((0, 0), (0, rows - values.shape[1]), (0, 0)))
