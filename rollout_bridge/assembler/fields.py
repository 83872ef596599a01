"""Fields of a row: what one site, or the routers, left of a token. Several workers may each send a part of one.

The vector of a field is a token's values at a layer, all heads one after the other. A part is a range of it that divides no unit: a
head, or a block where there is one vector only. Its bytes are then a range of the field's bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int32

from pallas_kernels import block_format
from trace_jax.guidance.site_record import BITS_PER_VALUE
from trace_jax.quantization.multipliers import KV_SITES

KEY_COLUMNS = {"sample": np.uint64, "attempt": np.uint16, "position": np.uint32, "pass": np.uint16, "version": np.int32}
"""Columns that say which row it is."""


@dataclasses.dataclass(frozen=True, eq=False)
class SiteLayout:
    """A recorded site.

    Args:
      format: block format of the rollout.
      size: d, values of one vector.
      lead: () or (KV heads,).
      layer_ids: global layer ids, ascending.
      multiplier: static float32 decode multipliers [Ls]; None for MXFP4.
    """

    format: str
    size: int
    lead: tuple[int, ...]
    layer_ids: tuple[int, ...]
    multiplier: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Field:
    """A field.

    Args:
      name: prefix of its arrays in a record.
      layer_ids: global layer ids, ascending.
      values: values of its vector.
      unit: values that stay together.
      per_unit: array name -> items of a unit.
      dtypes: array name -> dtype.
      keeps: which computation of a position counts when there are several.
      multiplier: what the worker must have rounded with, float32 [Ls]; None if there is none.
    """

    name: str
    layer_ids: Int32[np.ndarray, " Ls"]
    values: int
    unit: int
    per_unit: dict[str, int]
    dtypes: dict[str, type]
    keeps: Literal["first", "last"]
    multiplier: np.ndarray | None = None

    def items(self, array: str, values: int) -> int:
        """Items of an array that hold the first `values` values, a whole number of units or all of them."""
        return -(-values * self.per_unit[array] // self.unit)

    def check_part(self, start: int, stop: int) -> None:
        """Raises ValueError unless the part lies in the vector and divides no unit."""
        whole = start % self.unit == 0 and (stop % self.unit == 0 or stop == self.values)
        if not (0 <= start < stop <= self.values and whole):
            raise ValueError(f"{self.name}.part: {start}..{stop} of {self.values} values divides a unit of {self.unit} or lies outside")


def site_field(name: str, site: str, layout: SiteLayout, kind: str) -> Field:
    """The field of a recorded site: the expert input keeps the pass whose log-prob was returned, K and V what later tokens saw."""
    block = block_format(layout.format).block
    unit = layout.size if layout.lead else block
    per_unit = {"scales": -(-unit // block)}
    if kind != "scales":
        per_unit["data"] = -(-unit * BITS_PER_VALUE[kind] // 8)
    return Field(
        name=name,
        layer_ids=np.asarray(layout.layer_ids, np.int32),
        values=layout.size * int(np.prod(layout.lead, dtype=np.int64)),
        unit=unit,
        per_unit=per_unit,
        dtypes=dict.fromkeys(per_unit, np.uint8),
        keeps="last" if site in KV_SITES else "first",
        multiplier=layout.multiplier,
    )


def route_field(layer_ids: tuple[int, ...], experts_per_token: int, dtype: type) -> Field:
    """The field of the routes, of which one worker sends all."""
    k = experts_per_token
    return Field("routes", np.asarray(layer_ids, np.int32), k, k, {"ids": k}, {"ids": dtype}, "first")
