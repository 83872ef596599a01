"""The second step of flash decoding: the splits of a sequence and KV head become one output, an eighth of head_dim a program."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def padded(group: int) -> int:
    """Rows of a group of query heads in the partial sums: the next power of two."""
    return 1 << (group - 1).bit_length()


def _body(sums_ref, stats_ref, *rest, rows: int, factor: float):
    *multiplier_ref, out_ref = rest
    splits = sums_ref.shape[0]
    index = jnp.arange(1 << (splits - 1).bit_length(), dtype=jnp.int32)
    present, index = index < splits, jnp.minimum(index, splits - 1)
    if multiplier_ref:
        factor = multiplier_ref[0][0] * factor
    for row in range(rows):
        # A split without tokens has the maximum -inf and counts nothing, and all of them have it in a sequence without tokens.
        top = jnp.where(present, stats_ref[index, 0, row], -jnp.inf)
        highest = jnp.max(top, axis=0)
        share = jnp.exp2(top - jnp.where(highest == -jnp.inf, 0.0, highest))
        total = jnp.sum(stats_ref[index, 1, row] * share, axis=0)
        gain = jnp.where(total == 0.0, 0.0, factor / total)
        out_ref[row] = (jnp.sum(sums_ref[index, row, :] * share[:, None], axis=0) * gain).astype(out_ref.dtype)


def combine(
    sums: Float[Array, "B K splits parts rows words"],
    stats: Float[Array, "B K splits 2 rows"],
    multiplier: Float[Array, ""] | None,
    factor: float,
    group: int,
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "B H D"]:
    """sum(2^(maximum - top) * sums) / sum(2^(maximum - top) * total) over the splits, times the multiplier and `factor`.

    Args:
      sums: float32, weights times decoded values, unnormalized; value 4i + j of half h in column i of part 4h + j.
      stats: float32, the maximum of the scores (base 2) and the total of the weights.
      multiplier: float32 decode multiplier of the values, or None.
      factor: what else the decoded values lack.
      group: query heads of a KV head; rows beyond are padding.
      dtype: of the output.
      interpret: run in interpret mode.
    """
    batch, kv_heads, splits, parts, sixteen, columns = sums.shape
    rows = padded(group)
    multipliers = [] if multiplier is None else [multiplier.reshape(1)]
    out = pl.pallas_call(
        functools.partial(_body, rows=rows, factor=factor),
        grid=(parts, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, splits, None, sixteen, columns), lambda part, k, b: (b, k, 0, part, 0, 0)),
            pl.BlockSpec((None, None, splits, 2, sixteen), lambda part, k, b: (b, k, 0, 0, 0)),
            *[pl.BlockSpec((1,), lambda part, k, b: (0,))] * len(multipliers),
        ],
        out_specs=pl.BlockSpec((None, None, rows, None, columns, None), lambda part, k, b: (b, k, 0, part // 4, 0, part % 4)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, parts // 4, columns, 4), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=1 if splits * columns <= 1024 else 4),
        interpret=interpret,
    )(sums, stats, *multipliers)
    return out[:, :, :group].reshape((batch, kv_heads * group, parts * columns))
