"""Collects captured rows by sample until the sample ends.

1. `expect` opens a sample; rows of samples that are not open are dropped and counted.
2. `take` copies the rows of a record into slots of a fixed store, one slot a token. When it is full, rows are dropped and counted.
3. `finish` gives the rows of a finished sequence in order and frees their slots; `forget` only frees them.

A row is valid if all of its parts have come, from the pass that counts (`storage`). The last token of a sequence was never an input
and has no row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from rollout_bridge.assembler.fields import KEY_COLUMNS, SiteLayout
from rollout_bridge.assembler.layout import Layout
from rollout_bridge.assembler.records import make_routes, make_site
from rollout_bridge.assembler.storage import FieldRows
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import RecordKind
from trace_jax.rollout.routes import Routes


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """What was captured of a sequence of N tokens.

    Args:
      routes: None if the layout has none.
      guidance: None if the layout has none.
      audit: full codes, None if the sample was not audited.
      version: weights that computed each token's row; a token without one has that of the token before it.
      missing: how many of the first N - 1 tokens lack routes or guidance.
      recomputed: how many tokens were computed more than once.
    """

    routes: Routes | None
    guidance: GuidanceRecord | None
    audit: GuidanceRecord | None
    version: Int32[np.ndarray, " N"]
    missing: int
    recomputed: int


@dataclasses.dataclass
class Counts:
    """What happened to rows since the assembler was made.

    Args:
      taken: rows stored or merged.
      unexpected: rows of samples that were not open.
      overflow: rows for which there was no slot.
      missing, recomputed: sums over the finished samples (`Assembled`).
    """

    taken: int = 0
    unexpected: int = 0
    overflow: int = 0
    missing: int = 0
    recomputed: int = 0


class Assembler:
    """See the module. Used by one thread.

    Args:
      layout: what is captured.
      budget_bytes: most bytes of stored rows.

    Raises:
      ValueError: the budget does not hold a row.
    """

    def __init__(self, layout: Layout, budget_bytes: int = 2 << 30):
        self.counts = Counts()
        self._layout = layout
        fields = layout.fields()
        slots = budget_bytes // (1 + sum(FieldRows.row_bytes(field) for field in fields))
        if slots < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}, less than one token takes; give more")
        self._fields = {field.name: FieldRows(field, slots) for field in fields}
        self._recomputed = np.zeros(slots, bool)
        self._used = 0  # slots from here on were never used
        self._free: list[int] = []
        self._open: dict[tuple[int, int], dict[int, int]] = {}  # position -> slot

    def expect(self, sample: int, attempt: int) -> None:
        """Takes the rows of a sample from now on; what came of it before is dropped."""
        self._release((sample, attempt))
        self._open[sample, attempt] = {}

    def forget(self, sample: int) -> None:
        """Drops a sample in all its attempts; nothing happens if there is none."""
        for key in [key for key in self._open if key[0] == sample]:
            self._release(key)

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies what belongs to open samples out of a record. Records may come in any order and more than once.

        Args:
          arrays: a record as `vllm_plugin.capture.collector` describes it.

        Raises:
          ValueError: it does not fit the layout, or holds a token twice.
        """
        columns = {name: _column(arrays, name, dtype) for name, dtype in KEY_COLUMNS.items()}
        slots = self._slots(columns["sample"], columns["attempt"], columns["position"])
        kept = np.flatnonzero(slots >= 0)
        if np.unique(slots[kept]).size < kept.size:
            raise ValueError("position: a record holds a token twice; a record is one forward pass")
        passes, versions = columns["pass"].astype(np.int32), columns["version"]
        audited = np.asarray(arrays.get("audit.rows", ()), np.int64)
        known = {"audit.rows", *KEY_COLUMNS}
        for name, stored in self._fields.items():
            if f"{name}.part" not in arrays:
                continue
            known |= {f"{name}.{key}" for key in ("layers", "part", "multiplier", *stored.field.dtypes)}
            # Rows of the record's arrays: all of them, or those of audited samples.
            rows, chosen = (kept, kept) if not name.startswith("audit.") else _subset(audited, slots)
            stored.put(arrays, slots[rows], passes[rows], versions[rows], chosen)
        if unknown := arrays.keys() - known:
            raise ValueError(f"{sorted(unknown)[0]}: the layout has no such array; engine and trainer differ in the plan")
        self._recomputed[slots[kept]] |= passes[kept] > 0
        self.counts.taken += kept.size

    def finish(self, sample: int, attempt: int, num_tokens: int) -> Assembled:
        """Ends a sample.

        Args:
          sample, attempt: an open sample, all of whose records were taken.
          num_tokens: N, prompt and answer; rows at or behind the last token are dropped.

        Raises:
          ValueError: the sample is not open, or has no token.
        """
        if (sample, attempt) not in self._open or num_tokens < 1:
            raise ValueError(f"sample {sample}, attempt {attempt}, {num_tokens} tokens: not expected; call expect when it is submitted")
        place = np.full(num_tokens, -1, np.int64)
        for position, slot in self._open[sample, attempt].items():
            if position < num_tokens - 1:
                place[position] = slot
        complete = {name: self._complete(stored, place) for name, stored in self._fields.items()}
        recomputed = place >= 0
        recomputed[recomputed] = self._recomputed[place[recomputed]]
        version = self._versions(place)
        layout, routed = self._layout, complete.get("routes")
        guidance = self._record(layout.sites, "", layout.kind, place, complete, version, recomputed)
        audit = self._record(layout.audit, "audit.", "codes", place, complete, version, recomputed)
        there = [valid for valid in (None if guidance is None else guidance.valid, routed) if valid is not None]
        assembled = Assembled(
            routes=None if routed is None else make_routes(self._fields["routes"], place, routed),
            guidance=guidance,
            audit=audit if audit is not None and audit.valid.any() else None,
            version=version,
            missing=num_tokens - 1 - int(np.count_nonzero(np.logical_and.reduce(there))) if there else 0,
            recomputed=int(np.count_nonzero(recomputed)),
        )
        self.counts.missing += assembled.missing
        self.counts.recomputed += assembled.recomputed
        self._release((sample, attempt))
        return assembled

    def _slots(self, sample: np.ndarray, attempt: np.ndarray, position: np.ndarray) -> Int64[np.ndarray, " n"]:
        """Where each row belongs; -1 where it is dropped."""
        slots = np.full(sample.size, -1, np.int64)
        for row, (*key, place) in enumerate(zip(sample.tolist(), attempt.tolist(), position.tolist(), strict=True)):
            known = self._open.get((key[0], key[1]))
            if known is None:
                self.counts.unexpected += 1
                continue
            if place not in known:
                if not self._free and self._used == self._recomputed.size:
                    self.counts.overflow += 1
                    continue
                known[place] = self._free.pop() if self._free else self._used
                self._used = max(self._used, known[place] + 1)
            slots[row] = known[place]
        return slots

    def _release(self, key: tuple[int, int]) -> None:
        slots = list(self._open.pop(key, {}).values())
        for stored in self._fields.values():
            stored.clear(np.asarray(slots, np.int64))
        self._recomputed[slots] = False
        self._free += slots

    def _complete(self, stored: FieldRows, place: Int64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        valid = place >= 0
        valid[valid] = stored.complete(place[valid])
        return valid

    def _versions(self, place: Int64[np.ndarray, " N"]) -> Int32[np.ndarray, " N"]:
        version = np.full(place.size, -1, np.int32)
        for stored in self._fields.values():
            unknown = (place >= 0) & (version < 0)
            version[unknown] = stored.versions(place[unknown])
        last_known = np.maximum.accumulate(np.where(version >= 0, np.arange(place.size), 0))
        return np.maximum(version[last_known], 0)

    def _record(
        self,
        sites: Mapping[str, SiteLayout],
        prefix: str,
        kind: RecordKind | Literal["none"],
        place: Int64[np.ndarray, " N"],
        complete: Mapping[str, np.ndarray],
        version: Int32[np.ndarray, " N"],
        recomputed: Bool[np.ndarray, " N"],
    ) -> GuidanceRecord | None:
        """The record of these sites; None if there are none."""
        if kind == "none" or not sites:
            return None
        valid = np.logical_and.reduce([complete[prefix + name] for name in sites])
        made = {name: make_site(site, self._fields[prefix + name], place, valid, version) for name, site in sites.items()}
        return GuidanceRecord(kind, made, valid, version, recomputed)


def _column(arrays: Mapping[str, np.ndarray], name: str, dtype: type) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.shape != arrays["sample"].shape or array.ndim != 1:
        raise ValueError(f"{name}: expected {np.dtype(dtype)}[n] in every record; engine and trainer run different versions")
    return array


def _subset(indices: Int64[np.ndarray, " m"], slots: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a record that have a slot, among the given ones, and their places among those."""
    chosen = np.flatnonzero(slots[indices] >= 0)
    return indices[chosen], chosen
