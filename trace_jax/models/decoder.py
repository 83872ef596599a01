"""The loop over the layers that all families share: groups of stacked layers, each scanned, with inputs sliced by global layer ids.

A family gives the function of one layer. It gets the residual stream, the merged NNX module of the layer, its kind and a `LayerScope`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Shaped

from trace_jax.layers.kv_cache import KVCache
from trace_jax.models.blocks import normed
from trace_jax.models.decoder_config import DecoderConfig, Stack, places
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput
from trace_jax.models.layer_scope import LayerScope, Reports
from trace_jax.models.modules import Decoder
from trace_jax.sharding.axes import BATCH, constrain
from trace_jax.sharding.rules import gathered

ApplyLayer = Callable[[Any, str, Float[Array, "B T D"], LayerScope], Float[Array, "B T D"]]
"""(module of the layer, its kind, residual stream, scope) -> residual stream."""


def run_decoder(
    model: Decoder, config: DecoderConfig, inputs: ForwardInputs, options: ForwardOptions, apply_layer: ApplyLayer
) -> ForwardOutput:
    """Embeds the tokens, runs the layers and normalises.

    Args:
      model: merged NNX module with float32 (or compute-dtype) parameters.
      config: shape of the model; static.
      inputs: tokens, positions, mask and the optional replay, guidance and cache.
      options: static choices.
      apply_layer: the family's layer.

    Returns:
      Hidden states and everything that was asked for, see `ForwardOutput`.
    """
    dtype = jnp.dtype(options.compute_dtype)
    x = constrain(constrain(model.embed.weight[...], "tensor")[inputs.tokens].astype(dtype), BATCH)
    routes = None if inputs.routes is None else jnp.moveaxis(inputs.routes, 2, 0)
    cache, stacks, found = inputs.cache, iter(config.stacks), []
    for group, layers in zip(config.groups, model.groups, strict=True):
        members = [next(stacks) for _ in group.kinds]
        modules = [layers] if len(members) == 1 else list(layers)
        x, cache, reports = _run_group(modules, members, config, x, cache, routes, inputs, options, apply_layer)
        found += [(member.layer_ids, report) for member, report in zip(members, reports, strict=True)]
    reports = {kind: _in_order(found, kind) for kind in ("captured", "observed", "parity", "routes")}
    none = jnp.zeros((*inputs.tokens.shape, 0, config.experts_per_token), jnp.int32)
    return ForwardOutput(
        hidden=normed(x, model.final_norm, config.rms_norm_eps, config.NORM_OFFSET),
        routes=jnp.moveaxis(reports["routes"]["used"], 0, 2) if reports["routes"] else none,
        own_routes=jnp.moveaxis(reports["routes"]["own"], 0, 2) if reports["routes"] else none,
        captured=reports["captured"],
        observed=reports["observed"],
        parity=reports["parity"],
        cache=cache,
    )


def run_layer(
    module: nnx.Module,
    stack: Stack,
    config: DecoderConfig,
    x: Float[Array, "B T D"],
    inputs: ForwardInputs,
    options: ForwardOptions,
    apply_layer: ApplyLayer,
) -> tuple[Float[Array, "B T D"], Reports]:
    """One layer without a cache; `module` and what is returned have a leading axis of one. Arguments as in `run_decoder`."""
    x, _, (reports,) = _run_group([module], [stack], config, x, None, None, inputs, options, apply_layer)
    return x, reports


def _run_group(
    modules: Sequence[nnx.Module],
    members: Sequence[Stack],
    config: DecoderConfig,
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    routes: Shaped[Array, "Lm B T k"] | None,
    inputs: ForwardInputs,
    options: ForwardOptions,
    apply_layer: ApplyLayer,
) -> tuple[Float[Array, "B T D"], KVCache | None, list[Reports]]:
    """Scans over the repetitions of a pattern; one report for each of its members, stacked over the repetitions."""
    graphdefs, states = zip(*(nnx.split(module) for module in modules), strict=True)

    def body(
        carry: tuple[Float[Array, "B T D"], KVCache | None], xs: Any
    ) -> tuple[tuple[Float[Array, "B T D"], KVCache | None], list[Reports]]:
        (x, cache), reports = carry, []
        for graphdef, member, (state, *given) in zip(graphdefs, members, xs, strict=True):
            scope = LayerScope(*given, cache=cache, inputs=inputs, options=options)
            x = constrain(apply_layer(nnx.merge(graphdef, gathered(state)), member.kind, x, scope), BATCH)
            cache = scope.cache
            reports.append(scope.reports)
        return (x, cache), reports

    if options.remat:
        body = jax.checkpoint(body)
    xs = [(state, *_given(member, config, routes, inputs)) for state, member in zip(states, members, strict=True)]
    (x, cache), reports = jax.lax.scan(body, (x, cache), xs)
    return x, cache, reports


def _given(member: Stack, config: DecoderConfig, routes: Shaped[Array, "Lm B T k"] | None, inputs: ForwardInputs) -> tuple[Any, ...]:
    """What the layers of a stack take from the inputs of all layers, with a leading axis over its layers."""
    ids = np.asarray(member.layer_ids, np.int32)
    kept = config.recurrent_layer_ids if member.layer_ids[0] in config.recurrent_layer_ids else config.cache_layer_ids
    slots = np.searchsorted(kept, ids).astype(np.int32)
    everywhere = places(member.layer_ids, tuple(range(config.num_layers)))
    multipliers = {site: values[everywhere] for site, values in inputs.multipliers.items()}
    channels = {site: values[everywhere] for site, values in inputs.channels.items()}
    routed = config.moe_layer_ids
    replay = routes[places(member.layer_ids, routed)] if routes is not None and member.layer_ids[0] in routed else None
    return jnp.asarray(ids), jnp.asarray(slots), multipliers, channels, replay


def _in_order(found: Sequence[tuple[tuple[int, ...], Reports]], kind: str) -> dict[str, Any]:
    """One kind of report over all layers that make it, by ascending layer id along the leading axis."""
    names = list(dict.fromkeys(name for _, reports in found for name in reports.get(kind, {})))
    merged = {}
    for name in names:
        parts = [(ids, reports[kind][name]) for ids, reports in found if name in reports.get(kind, {})]
        if len(parts) == 1:
            merged[name] = parts[0][1]
        else:
            ids, reports = zip(*parts, strict=True)
            order = np.argsort(np.concatenate(ids))
            merged[name] = jax.tree.map(lambda *leaves, order=order: jnp.concatenate(leaves)[order], *reports)
    return merged
