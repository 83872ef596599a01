"""Gathers what the sites of one forward observed and makes a record of it.

Arrays of a record, n rows:

    sample u64[n], attempt u16[n], position u32[n], pass u16[n], version i32[n]      the key of each row
    SITE.data u8[n, Ls, *lead, bytes]      mantissa bits or codes by the plan's kind; absent for `scales`
    SITE.scales u8[n, Ls, *lead, blocks]
    SITE.multiplier f32[Ls]                under which the codes were made
    SITE.layers u16[Ls], SITE.part u32[2]  which layers, and which values of the vector (all heads one after the other) this worker has
    routes.ids u8|u16[n, Lm, k], routes.layers, routes.part
    audit.rows u32[m]                      rows of audited samples, and audit.SITE.* with all codes of these m rows

Sites that every tensor-parallel worker has are sent by the first one, divided ones (K and V, by heads) by each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.capture.plan import CapturePlan
from rollout_bridge.vllm_plugin.capture.requests import Rows
from rollout_bridge.vllm_plugin.numerics import Quantized, mantissa_bits

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class LocalSite:
    """A site in this worker.

    Args:
      layers: global ids of its layers here.
      part: first and last plus one of the vector's values that this worker sends.
    """

    layers: tuple[int, ...]
    part: tuple[int, int]


class Collector:
    """One for a worker.

    Args:
      plan: what to capture.
      sites: the sites that this worker sends.
      routed: layers with a router, and experts of each; None if another worker sends the routes.
      send: takes each record.
    """

    def __init__(
        self,
        plan: CapturePlan,
        sites: Mapping[str, LocalSite],
        routed: tuple[tuple[int, ...], int] | None,
        send: Callable[[Arrays], None],
    ):
        self.version = 0
        self._plan = plan
        self._sites = sites
        self._routed = routed
        self._send = send
        self._planned = {(name, layer) for name in plan.sites if name in sites for layer in self._layers(name)}
        self._rows: Rows | None = None
        self._seen: dict[tuple[str, int], Quantized] = {}
        self._routes: dict[int, Tensor] = {}

    @contextmanager
    def forward(self, rows: Rows) -> Iterator[None]:
        """Observes during a forward and sends its rows at the end; a forward that fails leaves nothing.

        Raises:
          RuntimeError: a planned site was not observed.
        """
        self._rows = rows if rows.index.size else None
        try:
            yield
            if self._rows is not None:
                self._send(self._record(self._rows))
        finally:
            self._rows = None
            self._seen.clear()
            self._routes.clear()

    @property
    def active(self) -> bool:
        """Whether the present forward has rows of samples."""
        return self._rows is not None

    def observe(self, site: str, layer: int, quantized: Quantized | None) -> Quantized | None:
        """Takes what a site made, if it is wanted, and gives it back; see `hooks.observe`."""
        if self._rows is not None and ((site, layer) in self._planned or (site in self._sites and self._audits(self._rows))):
            if quantized is not None:
                self._seen[site, layer] = quantized
            elif (site, layer) in self._planned:
                raise RuntimeError(f"site {site!r} of layer {layer} is not quantized by this engine; leave it out of guidance.sites")
        return quantized

    def route(self, layer: int, ids: Tensor) -> None:
        """Takes a router's choice, integers [rows, k]."""
        if self._rows is not None and self._routed is not None:
            # A copy, which the router cannot change afterwards; the bits of int16 are those of uint16.
            self._routes[layer] = ids[: self._rows.count].to(torch.uint8 if self._routed[1] <= 256 else torch.int16, copy=True)

    def _layers(self, site: str) -> list[int]:
        return [layer for layer in self._plan.layers if layer in self._sites[site].layers]

    def _audits(self, rows: Rows) -> bool:
        return self._plan.audit and bool(rows.audited.any())

    def _record(self, rows: Rows) -> Arrays:
        missing = sorted(self._planned - self._seen.keys())
        if missing:
            site, layer = missing[0]
            raise RuntimeError(f"site {site!r} of layer {layer} was not rounded; serve a quantized checkpoint with the plugin")
        arrays: Arrays = {
            "sample": rows.sample,
            "attempt": rows.attempt,
            "position": rows.position,
            "pass": rows.passes,
            "version": np.full(rows.index.size, self.version, np.int32),
        }
        for site in self._plan.sites:
            if site in self._sites and (layers := self._layers(site)):
                arrays |= self._site(site, site, layers, self._plan.kind, rows.index)
        if self._routed is not None:
            arrays |= self._route_arrays(self._routed[0], rows.index)
        if self._audits(rows):
            chosen = np.flatnonzero(rows.audited)
            arrays["audit.rows"] = chosen.astype(np.uint32)
            for site, local in self._sites.items():
                if layers := [layer for layer in local.layers if (site, layer) in self._seen]:
                    arrays |= self._site(f"audit.{site}", site, layers, "codes", rows.index[chosen])
        return arrays

    def _site(self, name: str, site: str, layers: Sequence[int], kind: str, index: np.ndarray) -> Arrays:
        seen = [self._seen[site, layer] for layer in layers]
        arrays: Arrays = {"scales": _host(_stack([q.scales for q in seen], index))}
        if kind != "scales":
            codes = _stack([q.codes for q in seen], index)
            arrays["data"] = _host(mantissa_bits(codes, seen[0].size) if kind == "mantissa" else codes)
        multipliers = [q.multiplier for q in seen if q.multiplier is not None]
        if multipliers:
            arrays["multiplier"] = _host(torch.stack(multipliers))
        return {f"{name}.{key}": array for key, array in (arrays | _place(layers, self._sites[site].part)).items()}

    def _route_arrays(self, layers: Sequence[int], index: np.ndarray) -> Arrays:
        ids = _host(_stack([self._routes[layer] for layer in layers], index))
        place = _place(layers, (0, ids.shape[-1]))
        return {f"routes.{key}": array for key, array in ({"ids": ids if ids.dtype == np.uint8 else ids.view(np.uint16)} | place).items()}


def _place(layers: Sequence[int], part: tuple[int, int]) -> Arrays:
    return {"layers": np.asarray(layers, np.uint16), "part": np.asarray(part, np.uint32)}


def _stack(layers: Sequence[Tensor], index: np.ndarray) -> Tensor:
    """[n, Ls, ...] of the chosen rows of every layer's [rows, ...]."""
    every = index[-1] == index.size - 1 if index.size else False  # ascending, so these are the first rows, all of them
    rows = torch.from_numpy(index).to(layers[0].device)
    return torch.stack([layer[: index.size] if every else layer.index_select(0, rows) for layer in layers], dim=1)


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().cpu().numpy()
