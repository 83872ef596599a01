"""The float32 factor of a native FP4 product: the multipliers of both sides, joined before they meet the sum."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.containers import Quantized
from pallas_kernels.grouped_matmul.tiles import group_bounds
from pallas_kernels.multiplier import align_multiplier


def row_factors(x: Quantized, weights: Quantized, group_sizes: Int[Array, " E"]) -> Float[Array, "N features"]:
    """float32(multiplier of the row * multiplier of its expert): one product, rounded once.

    Args:
      x: rows [N, K].
      weights: [E, F, K].
      group_sizes: int32 rows of each expert. Rows beyond them take the last expert's multiplier.

    Returns:
      [N, F] if the weights have a multiplier for each feature, else [N, 1]; ones for a format without multipliers.
    """
    _, stop = group_bounds(group_sizes, x.codes.shape[0])
    row = jnp.arange(x.codes.shape[0], dtype=jnp.int32)
    group = jnp.sum(stop[None, :] <= row[:, None], axis=1, dtype=jnp.int32)
    experts = group_sizes.shape[0]
    per_expert = _multiplier(weights)
    per_expert = jnp.broadcast_to(per_expert, (experts, per_expert.shape[1]))
    per_row = jnp.broadcast_to(_multiplier(x), row.shape)
    return per_row[:, None] * per_expert[jnp.minimum(group, experts - 1)]


def _multiplier(q: Quantized) -> Float[Array, "*#rows"]:
    """With one axis for every row axis."""
    rows = q.codes.shape[:-1]
    multiplier = align_multiplier(jnp.ones((), jnp.float32) if q.multiplier is None else q.multiplier, rows)
    return multiplier.reshape(multiplier.shape or (1,) * len(rows))
