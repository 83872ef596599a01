"""The experts of a layer on a mesh: every device holds some of them, and tokens travel.

Both ways are one fully manual `shard_map`. Inside, `expert` divides the experts, `tensor` the hidden width of each, and all batch axes
the tokens. What the devices contribute to a token is added in float32 and rounded once, as on one device.

* `gather_tokens`: every device sees the tokens of all devices along `expert` and computes what its experts add to them.
* `exchange_rows`: each copy of a token goes to the device of its expert, and the result comes back. No copy is ever dropped: a device has
  room for all copies of the tokens of its `expert` group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from trace_jax.sharding.axes import BATCH, per_shard

TOKENS = P(BATCH, None)

WEIGHTS = (P("expert", "tensor", None), P("expert", "tensor", None), P("expert", None, "tensor"))
"""Shares of gate and up `[E, F, D]`, and of down `[E, D, F]`."""

AddedToTokens = Callable[[Float[Array, "N width"], Int[Array, "N k"], Float[Array, "N k"], Any], Float[Array, "N D"]]
"""(x, ids, mixing, weights) -> what these experts add to every token, float32; ids that are none of theirs add nothing."""

ProductsOfRows = Callable[[Float[Array, "M width"], Int[Array, " E"], Any], Float[Array, "M D"]]
"""(rows sorted by expert, group sizes, weights) -> these experts applied to the rows; rows beyond the groups give zeros."""


def gather_tokens(
    added: AddedToTokens, x: Float[Array, "N width"], ids: Int[Array, "N k"], mixing: Float[Array, "N k"], weights: Any
) -> Float[Array, "N D"]:
    """Sums the selected experts of every token; all tokens of an `expert` group go to all of its devices.

    Args:
      added: computes with the experts of one device.
      x, ids, mixing: as in `apply_experts`.
      weights: named tuple of gate, up and down.
    """

    def share(x: Float[Array, "n width"], ids: Int[Array, "n k"], mixing: Float[Array, "n k"], weights: Any) -> Float[Array, "n D"]:
        x_all, ids_all, mixing_all = (jax.lax.all_gather(part, "expert", tiled=True) for part in (x, ids, mixing))
        first = jax.lax.axis_index("expert") * weights[0].shape[0]
        total = jax.lax.psum_scatter(added(x_all, ids_all - first, mixing_all, weights), "expert", tiled=True)
        return jax.lax.psum(total, "tensor").astype(x.dtype)

    return _on_shards(share, weights)(x, ids, mixing, weights)


def exchange_rows(
    products: ProductsOfRows,
    x: Float[Array, "N width"],
    ids: Int[Array, "N k"],
    mixing: Float[Array, "N k"],
    weights: Any,
    ragged: bool | None = None,
) -> Float[Array, "N D"]:
    """Sums the selected experts of every token; only the copies that an expert needs go to its device.

    Args:
      products: computes with the experts of one device.
      x, ids, mixing, weights: as in `gather_tokens`.
      ragged: whether the copies travel by `jax.lax.ragged_all_to_all`, without padding; None takes it on GPUs, CPUs do not have it.
    """
    ragged = jax.default_backend() == "gpu" if ragged is None else ragged

    def share(x: Float[Array, "n width"], ids: Int[Array, "n k"], mixing: Float[Array, "n k"], weights: Any) -> Float[Array, "n D"]:
        tokens, k = ids.shape
        experts = weights[0].shape[0]
        flat_ids = ids.reshape(-1)
        order = jnp.argsort(flat_ids, stable=True)
        devices = jax.lax.axis_size("expert")
        sent = jnp.bincount(flat_ids // experts, length=devices).astype(jnp.int32)
        route = Route(jax.lax.all_gather(sent, "expert"), tokens * k, ragged)
        # The copies arrive grouped by sender and are sorted again; places without a copy belong to an expert behind the last one.
        received_ids = route.send(flat_ids[order] % experts, fill=experts)
        received = route.send(x[order // k], fill=0)
        again = jnp.argsort(received_ids, stable=True)
        sizes = jnp.bincount(received_ids, length=experts + 1)[:experts].astype(jnp.int32)
        output = products(received[again], sizes, weights)
        returned = route.send_back(jnp.zeros_like(output).at[again].set(output, unique_indices=True))
        unsorted = jnp.zeros_like(returned).at[order].set(returned, unique_indices=True)
        total = jnp.sum(unsorted.reshape(tokens, k, -1).astype(jnp.float32) * mixing[:, :, None], axis=1)
        return jax.lax.psum(total, "tensor").astype(x.dtype)

    return _on_shards(share, weights)(x, ids, mixing, weights)


class Route(NamedTuple):
    """How many rows each device along `expert` sends to each other one; rows stand in the order of their receivers.

    A receiver keeps `room` places for every sender, so that rows of a sender stand where all devices expect them.

    Args:
      rows: from (first axis) and to (second axis), the same on all devices.
      room: places, at least the rows that one device has.
      ragged: whether `ragged_all_to_all` moves them.
    """

    rows: Int[Array, "devices devices"]
    room: int
    ragged: bool

    def send(self, rows: Shaped[Array, "room ..."], fill: int) -> Shaped[Array, "places ..."]:
        """The rows that the devices send here, `room` places for each of them; `fill` where there is none."""
        me, devices = jax.lax.axis_index("expert"), self.rows.shape[0]
        starts, mine = self._starts(), self.rows[me]
        if self.ragged:
            places = jnp.full((devices * self.room, *rows.shape[1:]), fill, rows.dtype)
            there = jnp.full(devices, me * self.room, jnp.int32)
            return jax.lax.ragged_all_to_all(rows, places, starts[me], mine, there, self.rows[:, me], axis_name="expert")
        place = jnp.arange(self.room, dtype=jnp.int32)[None]
        source = starts[me][:, None] + place
        full = (place < mine[:, None]).reshape(devices, self.room, *[1] * (rows.ndim - 1))
        slots = jnp.where(full, rows[jnp.minimum(source, self.room - 1)], jnp.asarray(fill, rows.dtype))
        return jax.lax.all_to_all(slots, "expert", 0, 0, tiled=True).reshape(-1, *rows.shape[1:])

    def send_back(self, places: Shaped[Array, "places ..."]) -> Shaped[Array, "room ..."]:
        """The inverse of `send`."""
        me, devices = jax.lax.axis_index("expert"), self.rows.shape[0]
        starts = self._starts()
        if self.ragged:
            rows = jnp.zeros((self.room, *places.shape[1:]), places.dtype)
            here = jnp.arange(devices, dtype=jnp.int32) * self.room
            return jax.lax.ragged_all_to_all(places, rows, here, self.rows[:, me], starts[:, me], self.rows[me], axis_name="expert")
        slots = jax.lax.all_to_all(places.reshape(devices, self.room, *places.shape[1:]), "expert", 0, 0, tiled=True)
        index = jnp.arange(self.room, dtype=jnp.int32)
        receiver = jnp.searchsorted(jnp.cumsum(self.rows[me]), index, side="right").astype(jnp.int32)
        return slots[receiver, index - starts[me][receiver]]

    def _starts(self) -> Int[Array, "devices devices"]:
        """First row of each receiver among the rows of each sender."""
        return (jnp.cumsum(self.rows, axis=1) - self.rows).astype(jnp.int32)


def _on_shards(share: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    return per_shard(share, (TOKENS, TOKENS, TOKENS, type(weights)(*WEIGHTS)), TOKENS)
