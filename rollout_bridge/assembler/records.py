"""Stored rows as the trainer's types."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32, Int64

from pallas_kernels import block_format
from rollout_bridge.assembler.fields import SiteLayout
from rollout_bridge.assembler.storage import FieldRows
from trace_jax.guidance.site_record import SiteRecord
from trace_jax.rollout.routes import Routes


def make_routes(stored: FieldRows, place: Int64[np.ndarray, " N"], valid: Bool[np.ndarray, " N"]) -> Routes:
    """The routes of a sequence.

    Args:
      stored: the field of the routes.
      place: slot of each token, -1 where there is none.
      valid: tokens whose row is complete.
    """
    return Routes(stored.rows("ids", place[valid], valid), valid, stored.field.layer_ids)


def make_site(
    layout: SiteLayout, stored: FieldRows, place: Int64[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], version: Int32[np.ndarray, " N"]
) -> SiteRecord:
    """One site of a sequence. Arguments as `make_routes`; `version` is that of the record, and the site's where it has another."""

    def rows(name: str) -> np.ndarray:
        flat = stored.rows(name, place[valid], valid)
        return flat.reshape(*flat.shape[:2], *layout.lead, flat.shape[-1] // int(np.prod(layout.lead, dtype=np.int64)))

    own = version.copy()
    own[valid] = stored.versions(place[valid])
    return SiteRecord(
        format=layout.format,
        block=block_format(layout.format).block,
        size=layout.size,
        layer_ids=stored.field.layer_ids,
        data=rows("data") if "data" in stored.field.dtypes else None,
        scales=rows("scales"),
        multiplier=layout.multiplier,
        version=None if np.array_equal(own, version) else own,
    )
