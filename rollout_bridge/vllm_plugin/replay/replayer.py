"""Puts recorded codes and routes in the place of the engine's own, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.capture.plan import SITES
from rollout_bridge.vllm_plugin.capture.requests import Rows
from rollout_bridge.vllm_plugin.numerics import Quantized

Arrays = Mapping[str, np.ndarray]


class Replayer:
    """Recorded rows by sample and position, and the rows of the present forward that have one.

    Args:
      records: of one layout, copied. Of two rows for the same token the later one counts.

    Raises:
      ValueError: no record, or records without codes or of different layouts.
    """

    def __init__(self, records: Iterable[Arrays]):
        parts = [{name: array.copy() for name, array in record.items()} for record in records]
        if not parts:
            raise ValueError("no record came; send the recorded trajectories before the ring is closed")
        first, keyed = parts[0], ("sample", "attempt", "position")
        columns = [np.concatenate([part[name] for part in parts]).tolist() for name in keyed]
        self._rows = {key: row for row, key in enumerate(zip(*columns, strict=True))}
        self._layers: dict[str, dict[int, int]] = {}
        self._stored: dict[str, Tensor] = {}
        for field, arrays in {"routes": ("ids",), **dict.fromkeys(SITES, ("data", "scales"))}.items():
            if f"{field}.layers" not in first:
                continue
            if any(not np.array_equal(first[f"{field}.layers"], part.get(f"{field}.layers")) for part in parts):
                raise ValueError(f"{field}.layers: the records have different layers; replay one cache at a time")
            self._layers[field] = {int(layer): slot for slot, layer in enumerate(first[f"{field}.layers"])}
            for name in (f"{field}.{array}" for array in arrays):
                if any(name not in part for part in parts):
                    raise ValueError(f"{name} is missing: a replay needs a cache with guidance.record: codes")
                array = np.concatenate([part[name] for part in parts])
                self._stored[name] = torch.from_numpy(array if field != "routes" else array.astype(np.int64))
        self._multipliers = {name: first[f"{name}.multiplier"] for name in SITES if f"{name}.multiplier" in first}
        self._target = self._source = torch.zeros(0, dtype=torch.int64)

    @contextmanager
    def forward(self, rows: Rows) -> Iterator[None]:
        """Replays during a forward."""
        keys = zip(rows.sample.tolist(), rows.attempt.tolist(), rows.position.tolist(), strict=True)
        found = [(index, self._rows[key]) for index, key in zip(rows.index.tolist(), keys, strict=True) if key in self._rows]
        self._target, self._source = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
        try:
            yield
        finally:
            self._target = self._source = self._target[:0]

    @property
    def active(self) -> bool:
        """Whether the present forward has recorded rows."""
        return self._target.numel() > 0

    def observe(self, site: str, layer: int, quantized: Quantized | None) -> Quantized | None:
        """The recorded codes and scales in the recorded rows, the engine's own in the others.

        Raises:
          ValueError: the engine does not round this site, or under another multiplier.
        """
        slot = self._layers.get(site, {}).get(layer)
        if slot is None or not self.active:
            return quantized
        expected = torch.from_numpy(self._multipliers[site])[slot] if site in self._multipliers else None
        if quantized is None or (expected is not None and not torch.equal(expected, quantized.multiplier.cpu())):
            raise ValueError(f"site {site!r} of layer {layer} is rounded otherwise than in the record; serve the checkpoint that made it")
        codes, scales = (
            own.index_copy(0, self._target.to(own.device), self._stored[f"{site}.{name}"][self._source, slot].to(own.device))
            for name, own in (("data", quantized.codes), ("scales", quantized.scales))
        )
        return dataclasses.replace(quantized, codes=codes, scales=scales)

    def restrict(self, layer: int, logits: Tensor) -> Tensor:
        """Router logits [rows, E] that leave the recorded rows no other experts than the recorded ones."""
        slot = self._layers.get("routes", {}).get(layer)
        if slot is None or not self.active:
            return logits
        target = self._target.to(logits.device)
        ids = self._stored["routes.ids"][self._source, slot].to(logits.device)
        rows = logits[target]
        allowed = torch.full_like(rows, -torch.inf).scatter(1, ids, rows.gather(1, ids))
        return logits.index_copy(0, target, allowed)
