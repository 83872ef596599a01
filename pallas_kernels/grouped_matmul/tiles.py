"""Which rows a program of a grouped product works on.

Rows are sorted by group and groups start anywhere, so row tiles are cut inside the groups: a table says for every tile its
group and its rows. The number of tiles depends on the data; the table has room for the worst case, and the tiles that are
left over are empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class RowTiles(NamedTuple):
    """Tile t holds rows start[t] .. stop[t] - 1 of group[t]; group E stands for rows beyond the last group."""

    group: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    stop: Int[Array, " tiles"]


def count_tiles(rows: int, groups: int, tile: int) -> int:
    """Tiles that suffice for any sizes: each group that has rows, the rest included, wastes at most one."""
    return min(rows, rows // tile + min(groups + 1, rows))


def group_bounds(group_sizes: Int[Array, " E"], rows: int) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
    """(first row, row after the last) of each group, within 0 .. rows."""
    stop = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0).astype(jnp.int32)), rows)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), stop[:-1]]), stop


def row_tiles(group_sizes: Int[Array, " E"], rows: int, tile: int) -> RowTiles:
    """The table for rows sorted by group, at most `tile` rows a tile."""
    groups = group_sizes.shape[0]
    _, stop = group_bounds(group_sizes, rows)
    stop = jnp.concatenate([stop, jnp.full((1,), rows, jnp.int32)])
    start = jnp.concatenate([jnp.zeros((1,), jnp.int32), stop[:-1]])
    last_tile = jnp.cumsum((stop - start + tile - 1) // tile).astype(jnp.int32)
    first_tile = jnp.concatenate([jnp.zeros((1,), jnp.int32), last_tile[:-1]])
    index = jnp.arange(count_tiles(rows, groups, tile), dtype=jnp.int32)
    # Comparing with all groups makes one fused loop of what a binary search would make several of.
    group = jnp.minimum(jnp.sum(last_tile[None, :] <= index[:, None], axis=1, dtype=jnp.int32), groups)
    first = start[group] + (index - first_tile[group]) * tile
    return RowTiles(group, first, jnp.minimum(first + tile, stop[group]))
