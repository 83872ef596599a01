"""One decoder layer while it is traced: what it is given beside its weights, and what it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.layers.kv_cache import KVCache, RecurrentState, append, read
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, SiteValues
from trace_jax.quantization.channels import channel_energy
from trace_jax.quantization.sites import Captured, parity_agreement, round_site

Reports = dict[str, dict[str, Any]]
"""Kind of report (`captured`, `observed`, `parity`, `routes`) -> name -> arrays of one layer."""


class LayerScope:
    """Rounds the sites of one layer and keeps its cache.

    Args:
      layer_id: global id, traced.
      cache_slot: index of the layer among those that keep the same thing in the cache, traced.
      multipliers: the layer's static multipliers by site.
      channels: the layer's compensated channels by site.
      replay: expert ids to use instead of the router's; None without replay.
      cache: the whole cache, of which `store` replaces the layer's part; None without one.
      inputs, options: of the forward pass.
    """

    def __init__(
        self,
        layer_id: Int[Array, ""],
        cache_slot: Int[Array, ""],
        multipliers: dict[str, Float[Array, ""]],
        channels: dict[str, Int[Array, " _"]],
        replay: Int[Array, "B T k"] | None,
        cache: KVCache | None,
        inputs: ForwardInputs,
        options: ForwardOptions,
    ):
        self.layer_id, self.cache_slot = layer_id, cache_slot
        self.multipliers, self.channels, self.replay = multipliers, channels, replay
        self.cache, self.inputs, self.options = cache, inputs, options
        self.reports: Reports = {"captured": {}, "observed": {}, "parity": {}}
        self._kept: dict[str, Captured] = {}

    def round(self, site: str, x: Float[Array, "B T *width"], lead: int) -> Float[Array, "B T *rounded"]:
        """Rounds a site that can be recorded; `lead` axes stand between T and the width."""
        inputs, options = self.inputs, self.options
        plan, multiplier = options.plan.site(site), self.multipliers.get(site)
        guide = inputs.guides.of(site, self.layer_id, lead) if plan.guided and inputs.guides is not None else None
        wanted = site in options.capture or (inputs.cache is not None and site in ("k", "v"))
        per_token, channels = options.plan.per_token, self.channels.get(site)
        rounded, captured = round_site(site, x, plan, multiplier, per_token=per_token, guide=guide, capture=wanted, channels=channels)
        self._observe(site, x, rounded)
        if captured is not None:
            self._kept[site] = captured
            if site in options.capture:
                self.reports["captured"][site] = captured
        if options.measure_parity and guide is not None and guide.kind != "scales":
            self.reports["parity"][site] = parity_agreement(site, x, rounded, guide, plan, multiplier)
        return rounded

    def round_hidden(self, hidden: Float[Array, "*rows F"]) -> Float[Array, "*rows width"]:
        """Rounds the input of the experts' down projection, to nearest on both paths."""
        site, plan = "down_input", self.options.plan
        multiplier, channels = self.multipliers.get(site), self.channels.get(site)
        rounded = round_site(site, hidden, plan.site(site), multiplier, per_token=plan.per_token, channels=channels)[0]
        if self.options.observe != "values":
            self._observe(site, hidden, rounded)
        return rounded

    def through_cache(
        self, key: Float[Array, "B T K k_width"], value: Float[Array, "B T K v_width"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "B S K k_width"], Float[Array, "B S K v_width"]]:
        """Rounded keys and values as the attention reads them: themselves, or all slots of the cache with these written first."""
        cache = self.cache
        if cache is None:
            return key, value
        positions = self.inputs.positions
        self.cache = cache = replace(
            cache,
            k=append(cache.k, self.cache_slot, positions, key, self._kept.get("k")),
            v=append(cache.v, self.cache_slot, positions, value, self._kept.get("v")),
        )
        widths = key.shape[-1], value.shape[-1]
        return (
            read(cache.k, self.cache_slot, widths[0], self.multipliers.get("k"), dtype),
            read(cache.v, self.cache_slot, widths[1], self.multipliers.get("v"), dtype),
        )

    def recurrent(self) -> tuple[Float[Array, "B H key value"], Float[Array, "B before channels"]] | None:
        """State and earlier inputs of a layer of linear attention; None without a cache."""
        if self.cache is None or self.cache.recurrent is None:
            return None
        return self.cache.recurrent.state[self.cache_slot], self.cache.recurrent.inputs[self.cache_slot]

    def keep_recurrent(self, state: Float[Array, "B H key value"], inputs: Float[Array, "B before channels"]) -> None:
        """Replaces them; does nothing without a cache."""
        if self.cache is None or self.cache.recurrent is None:
            return
        old, slot = self.cache.recurrent, self.cache_slot
        self.cache = replace(self.cache, recurrent=RecurrentState(old.state.at[slot].set(state), old.inputs.at[slot].set(inputs)))

    def key_positions(self) -> Int[Array, "B S"]:
        """Positions of the keys that the attention reads."""
        if self.cache is None:
            return self.inputs.positions
        return jnp.arange(self.cache.num_slots, dtype=jnp.int32)[None]

    def _observe(self, site: str, x: Float[Array, "*site"], rounded: Float[Array, "*rounded"]) -> None:
        observed, kind = self.reports["observed"], self.options.observe
        if kind == "amax":
            observed[site] = jnp.max(jnp.abs(x)).astype(jnp.float32)
        elif kind == "values":
            observed[site] = SiteValues(x, rounded)
        elif kind == "residual":
            observed[site] = channel_energy(x, rounded)
