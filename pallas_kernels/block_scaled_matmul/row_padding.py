"""Rows of groups that start anywhere, laid out so that every tile of 128 rows belongs to one group.

The table is that of `grouped_matmul.tiles`; here the rows of tile t are copied to 128 t, 128 t + 1, ... and the rest of the tile is
zeros. Scales in the 128x4 order can be cut at multiples of 128 only, so something has to move; moving codes and scales of the rows (half a
byte a value) is the cheaper side, the product is stored at its final place. It costs at most 127 rows of zeros for each group.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.grouped_matmul.tiles import RowTiles


def padded_rows(tiles: RowTiles, tile: int, rows: int) -> Int[Array, " padded"]:
    """The source row of every padded row; `rows`, one beyond the last, where there is none."""
    row = tiles.start[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    return jnp.where(row < tiles.stop[:, None], row, rows).reshape(-1)


def take_rows(values: Shaped[Array, "rows ..."], source: Int[Array, " padded"]) -> Shaped[Array, "padded ..."]:
    """The rows in the padded order, zeros where there is none."""
    return values.at[source].get(mode="fill", fill_value=0)
