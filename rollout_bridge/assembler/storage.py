"""Rows of a field by slot, with what is known of each: the pass and version it came from, and which parts have come."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int32, Int64

from rollout_bridge.assembler.fields import Field

_MOST_PARTS = 64


class FieldRows:
    """Storage of one field.

    A row's parts count together only if they come from one pass, so that no row is mixed from two computations of its token. The
    order in which records come does not matter.

    Args:
      field: what is stored.
      slots: rows. Memory is used as slots are.
    """

    def __init__(self, field: Field, slots: int):
        self.field = field
        layers = field.layer_ids.size
        self._arrays = {name: np.zeros((slots, layers, field.items(name, field.values)), dtype) for name, dtype in field.dtypes.items()}
        self._pass = np.zeros(slots, np.int32)
        self._version = np.zeros(slots, np.int32)
        self._mask = np.zeros(slots, np.uint64)
        self._parts: dict[tuple[bytes, int, int], int] = {}

    @staticmethod
    def row_bytes(field: Field) -> int:
        """Bytes of one slot."""
        layers = field.layer_ids.size
        return 16 + sum(layers * field.items(name, field.values) * np.dtype(dtype).itemsize for name, dtype in field.dtypes.items())

    def clear(self, slots: Int64[np.ndarray, " n"]) -> None:
        """Forgets what the slots hold."""
        self._mask[slots] = 0

    def put(
        self, record: Mapping[str, np.ndarray], slots: Int64[np.ndarray, " n"], passes: np.ndarray, versions: np.ndarray, chosen: np.ndarray
    ) -> None:
        """Takes the rows of a record.

        Args:
          record: arrays of the record.
          slots: where its chosen rows belong, different ones.
          passes, versions: of these rows.
          chosen: int64[n], which rows of the record's arrays they are.

        Raises:
          ValueError: arrays that do not fit the field.
        """
        name = self.field.name
        arrays = {key: record[f"{name}.{key}"] for key in ("layers", "part", *self.field.dtypes) if f"{name}.{key}" in record}
        if len(arrays) < 2 + len(self.field.dtypes):
            wanted = ["layers", "part", *self.field.dtypes]
            raise ValueError(f"{name}: the record lacks one of {wanted}; engine and trainer differ in the plan")
        start, stop = (int(bound) for bound in arrays["part"])
        self.field.check_part(start, stop)
        layers = self._layer_slots(arrays["layers"], record.get(f"{name}.multiplier"))
        bit = self._bit(arrays["layers"], start, stop)

        # The first computation of a position has pass 0; of later ones the highest counts.
        known = self._mask[slots] != 0
        if self.field.keeps == "first":
            used = passes == 0
            fresh = used & ~known
        else:
            fresh = ~known | (passes > self._pass[slots])
            used = fresh | (passes == self._pass[slots])
        for key in self.field.dtypes:
            target, span = self._arrays[key], slice(self.field.items(key, start), self.field.items(key, stop))
            rows = self._checked(key, arrays[key], layers.size, span)[chosen[used]]
            if rows.shape[1:] == target.shape[1:]:
                target[slots[used]] = rows  # several times as fast
            else:
                target[slots[used][:, None], layers, span] = rows
        self._pass[slots[fresh]] = passes[fresh]
        self._version[slots[fresh]] = versions[fresh]
        self._mask[slots[fresh]] = bit
        self._mask[slots[used & ~fresh]] |= bit

    def complete(self, slots: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which slots have every value of every layer."""
        masks, inverse = np.unique(self._mask[slots], return_inverse=True)
        return np.asarray([self._covers(int(mask)) for mask in masks], bool)[inverse.reshape(-1)]

    def versions(self, slots: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """The weights behind each slot, -1 where nothing has come."""
        return np.where(self._mask[slots] != 0, self._version[slots], np.int32(-1))

    def rows(self, array: str, slots: Int64[np.ndarray, " n"], valid: Bool[np.ndarray, " N"]) -> np.ndarray:
        """[N, Ls, items]: the slots in the places of the valid rows, zeros elsewhere."""
        stored = self._arrays[array]
        rows = np.zeros((valid.size, *stored.shape[1:]), stored.dtype)
        rows[valid] = stored[slots]
        return rows

    def _layer_slots(self, layer_ids: np.ndarray, multiplier: np.ndarray | None) -> np.ndarray:
        layers = np.searchsorted(self.field.layer_ids, layer_ids)
        if layers.size == 0 or not np.array_equal(self.field.layer_ids[np.minimum(layers, self.field.layer_ids.size - 1)], layer_ids):
            raise ValueError(
                f"{self.field.name}.layers: {layer_ids.tolist()} of {self.field.layer_ids.tolist()}; engine and trainer differ in the plan"
            )
        expected = None if self.field.multiplier is None else self.field.multiplier[layers]
        if expected is not None and (multiplier is None or not np.array_equal(expected, multiplier)):
            raise ValueError(
                f"{self.field.name}.multiplier: the engine rounds with {None if multiplier is None else multiplier.tolist()}, "
                f"the trainer with {expected.tolist()}; send the weights with their multipliers first"
            )
        return layers

    def _checked(self, key: str, array: np.ndarray, layers: int, span: slice) -> np.ndarray:
        shape = (array.shape[0], layers, span.stop - span.start)
        flat = array.reshape(*array.shape[:2], -1) if array.ndim > 2 else array
        if flat.shape != shape or array.dtype != self.field.dtypes[key]:
            raise ValueError(f"{self.field.name}.{key}: {array.dtype}{list(array.shape)}, expected {list(shape)} items; give both one plan")
        return flat

    def _bit(self, layer_ids: np.ndarray, start: int, stop: int) -> np.uint64:
        place = self._parts.setdefault((layer_ids.astype(np.int32).tobytes(), start, stop), len(self._parts))
        if place >= _MOST_PARTS:
            raise ValueError(f"{self.field.name}: more than {_MOST_PARTS} different parts; use fewer tensor-parallel workers")
        return np.uint64(1 << place)

    def _covers(self, mask: int) -> bool:
        covered = np.zeros((self.field.layer_ids.size, self.field.values), bool)
        for (layer_ids, start, stop), place in self._parts.items():
            if mask >> place & 1:
                covered[np.isin(self.field.layer_ids, np.frombuffer(layer_ids, np.int32)), start:stop] = True
        return bool(covered.all())
