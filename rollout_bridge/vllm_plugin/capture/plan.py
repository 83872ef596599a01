"""What to capture, as the trainer says it in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

KINDS = ("none", "scales", "mantissa", "codes")
SITES = ("expert_input", "k", "v")


@dataclasses.dataclass(frozen=True)
class CapturePlan:
    """What to capture.

    Args:
      kind: `scales`, `mantissa` (one bit a value), `codes` (four bits a value), or `none`.
      layers: global layer ids; layers that lack a site are left out for it.
      sites: of `SITES`.
      routes: whether the routers' expert ids are captured, at every layer that has a router.
      audit: whether requests that ask for it get full codes of every site at every layer as well.
    """

    kind: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    routes: bool
    audit: bool

    @classmethod
    def parse(cls, plan: Mapping[str, Any]) -> CapturePlan:
        """The plan of `{"kind": ..., "layers": [...], "sites": [...], "routes": bool, "audit": bool}`.

        Raises:
          ValueError: an unknown or missing key, or a value outside its range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if sorted(plan) != sorted(names):
            raise ValueError(f"the capture plan has the keys {sorted(plan)}; write {names}")
        layers, sites = tuple(plan["layers"]), tuple(plan["sites"])
        if plan["kind"] not in KINDS:
            raise ValueError(f"capture kind {plan['kind']!r}; write one of {KINDS}")
        if any(site not in SITES for site in sites) or len(set(sites)) < len(sites):
            raise ValueError(f"capture sites {list(sites)}; write each of {SITES} at most once")
        if any(not isinstance(layer, int) or layer < 0 for layer in layers) or list(layers) != sorted(set(layers)):
            raise ValueError(f"capture layers {list(layers)}; write ascending global layer ids")
        return cls(plan["kind"], layers, sites if plan["kind"] != "none" else (), bool(plan["routes"]), bool(plan["audit"]))
