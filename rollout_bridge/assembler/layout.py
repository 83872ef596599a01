"""What is captured and what is made of it: one description for the engine's plan, the ring and the assembler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pallas_kernels import block_format
from rollout_bridge.assembler.fields import KEY_COLUMNS, Field, SiteLayout, route_field, site_field
from rollout_bridge.wire import record_bytes
from trace_jax.guidance.site_record import RecordKind
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES, QuantPlan
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.routes import route_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What is captured.

    Args:
      kind: kind of the guidance record.
      sites: sites of the guidance record; none for kind `none`.
      audit: sites of an audited sample, all codes at all layers; none without audits.
      moe_layer_ids: layers whose routes are captured; none without routes.
      num_experts, experts_per_token: of the model.
    """

    kind: RecordKind | Literal["none"]
    sites: Mapping[str, SiteLayout]
    audit: Mapping[str, SiteLayout]
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(
        cls,
        config: Any,
        plan: QuantPlan,
        capture: CaptureSpec,
        multipliers: Mapping[str, Float[Any, " L"]],
        *,
        audit: bool,
        routes: bool = True,
    ) -> Layout:
        """The layout of a model, each site at the layers that have it.

        Args:
          config: the policy's configuration.
          plan: what the rollout rounds; sites in other than block formats have no record.
          capture: kind, sites and layers of the guidance record.
          multipliers: static multipliers of the plan's sites.
          audit: whether some requests are audited.
          routes: whether routes are captured.

        Raises:
          ValueError: multipliers of the tokens' own, which this engine does not capture.
        """
        if plan.per_token:
            raise ValueError("activation_scale=per_token: the vLLM engine has static multipliers only; write activation_scale: static")
        everywhere = tuple(range(config.num_layers))

        def sites(names: tuple[str, ...], layers: tuple[int, ...]) -> dict[str, SiteLayout]:
            made = {}
            for name in names if layers else ():
                fmt = plan.site(name).format
                there = tuple(layer for layer in layers if layer in config.layers_of(name))
                if fmt in BLOCK_FORMATS and there:
                    site = config.sites[name]
                    scale = np.asarray(multipliers[name], np.float32)[list(there)] if block_format(fmt).has_multiplier else None
                    made[name] = SiteLayout(fmt, site.width, site.lead, there, scale)
            return made

        recorded = sites(capture.sites, capture.layers) if capture.kind != "none" else {}
        return cls(
            kind=capture.kind if recorded else "none",
            sites=recorded,
            audit=sites(RECORDED_SITES, everywhere) if audit else {},
            moe_layer_ids=config.moe_layer_ids if routes else (),
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
        )

    def plan(self) -> dict[str, Any]:
        """The JSON plan of `vllm_plugin.capture.start_capture`."""
        return {
            "kind": self.kind,
            "layers": sorted({layer for site in self.sites.values() for layer in site.layer_ids}),
            "sites": list(self.sites),
            "routes": bool(self.moe_layer_ids),
            "audit": bool(self.audit),
        }

    def fields(self) -> list[Field]:
        """Everything that is assembled; the first one's version is that of the row."""
        made = [site_field(name, name, site, self.kind) for name, site in self.sites.items()]
        if self.moe_layer_ids:
            made.append(route_field(self.moe_layer_ids, self.experts_per_token, route_dtype(self.num_experts)))
        made += [site_field(f"audit.{name}", name, site, "codes") for name, site in self.audit.items()]
        return sorted(made, key=lambda field: field.keeps != "first")

    def record_bytes(self, rows: int) -> int:
        """Bytes of the largest record of a forward of so many rows: the least `slot_bytes` of the ring."""

        def blank(dtype: Any, *shape: int) -> np.ndarray:
            return np.broadcast_to(np.zeros((), dtype), shape)

        arrays = {name: blank(dtype, rows) for name, dtype in KEY_COLUMNS.items()} | {"audit.rows": blank(np.uint32, rows)}
        for field in self.fields():
            layers = field.layer_ids.size
            for name, dtype in field.dtypes.items():
                arrays[f"{field.name}.{name}"] = blank(dtype, rows, layers, 1, field.items(name, field.values))
            arrays |= {f"{field.name}.layers": blank(np.uint16, layers), f"{field.name}.part": blank(np.uint32, 2)}
            arrays[f"{field.name}.multiplier"] = blank(np.float32, layers)
        return record_bytes(arrays)
