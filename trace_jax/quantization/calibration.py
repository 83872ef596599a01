"""Calibration on real sequences: the static multipliers, and the channels whose residual the rollout compensates.

Run once, multipliers after the cold start or the import and channels at the start of a run; both are stored with the checkpoint and stay
constant for a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from trace_jax.errors import UserError
from trace_jax.layers.attention import causal_mask
from trace_jax.models.decoder_config import Stack
from trace_jax.models.finite import require_finite
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.key_map import flatten, nest
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, apply_layer, param_shapes
from trace_jax.quantization.channels import Channels, channel_counts, largest_channels
from trace_jax.quantization.multipliers import Multipliers, static_multipliers
from trace_jax.quantization.plan import UNQUANTIZED, QuantPlan
from trace_jax.quantization.weights import with_rounded_experts
from trace_jax.sharding.placement import to_host

ReadLayer = Callable[[tuple[str | int, ...], tuple[int, ...]], Float[np.ndarray, "*shape"]]
"""(path of a parameter, indices of its leading axes) -> float32 values; `ParamSource.read`."""

ROWS = 16
"""Sequences per forward pass."""


def calibrate(policy: Policy, params: Params, sequences: Sequence[Sequence[int]], headroom: float) -> Multipliers:
    """Static multipliers of every site and layer, from the unquantized forward over some sequences.

    Args:
      params: float32 masters.
      sequences: token ids of prompts with their answers; padding never counts.
      headroom: factor on the largest magnitude seen, at least 1.

    Raises:
      UserError: there is no token, or a weight or a magnitude is not finite.
    """
    sequences = _not_empty(sequences)
    require_finite(params, "calibration")
    amax: dict[str, np.ndarray] = {}
    for batch in _equal_length_batches(sequences):
        for site, value in to_host(_amax(params, jnp.asarray(batch), policy=policy)).items():
            amax[site] = np.maximum(amax.get(site, 0.0), value)
    return _from_largest(policy, amax, headroom)


def calibrate_by_layers(policy: Policy, read: ReadLayer, sequences: Sequence[Sequence[int]], headroom: float) -> Multipliers:
    """`calibrate` with one layer of the model in memory at a time, beside the residual streams of the sequences.

    Args:
      read: a float32 master, whole or of one layer.
      sequences, headroom: as in `calibrate`.

    Raises:
      UserError: as `calibrate`, and what `read` raises.
    """
    config = policy.config
    table = read(("embed", "weight"), ())
    streams = [(batch, jnp.asarray(table[batch], policy.compute_dtype)) for batch in _equal_length_batches(_not_empty(sequences))]
    del table
    amax: dict[str, dict[int, np.ndarray]] = {}
    for layer in range(config.num_layers):
        stack = next(stack for stack in config.stacks if layer in stack.layer_ids)
        params = _layer_params(policy, stack, (stack.layer_ids.index(layer),), read)
        for number, (batch, x) in enumerate(streams):
            # All layers of a stack run as its first one: one program serves them.
            x, found = _layer_amax(params, x, jnp.asarray(batch), policy=policy, stack=stack.only(0))
            streams[number] = batch, x
            for site, value in to_host(found).items():
                seen = amax.setdefault(site, {})
                seen[layer] = np.maximum(seen.get(layer, 0.0), value)
    return _from_largest(policy, {site: np.concatenate([seen[layer] for layer in sorted(seen)]) for site, seen in amax.items()}, headroom)


def _layer_params(policy: Policy, stack: Stack, place: tuple[int, ...], read: ReadLayer) -> Params:
    """The parameters of one layer, with a leading axis of one."""
    tree: Any = param_shapes(policy.family, policy.config)
    for key in stack.path:
        tree = tree[key]
    return nest({path: jnp.asarray(read((*stack.path, *path), place))[None] for path in flatten(tree)})


def _from_largest(policy: Policy, amax: Mapping[str, np.ndarray], headroom: float) -> Multipliers:
    """Multipliers from the largest magnitude of every site in the layers that have it."""
    config = policy.config
    for site, value in amax.items():
        if not np.all(np.isfinite(value)):
            layer = config.layers_of(site)[int(np.flatnonzero(~np.isfinite(value))[0])]
            raise UserError(
                f"layer {layer} produces values that are not finite at {site}; the checkpoint's weights are damaged (NaN or Inf)"
            )
    everywhere = {
        site: _over_all_layers(np.asarray(value, np.float32), config.layers_of(site), config.num_layers) for site, value in amax.items()
    }
    return static_multipliers({site: jnp.asarray(value) for site, value in everywhere.items()}, headroom)


def choose_channels(
    policy: Policy, plan: QuantPlan, params: Params, multipliers: Multipliers, sequences: Sequence[Sequence[int]], fraction: float
) -> Channels:
    """The channels of the experts' inputs with the largest squared residuals over some sequences, in every layer.

    The residuals are those of the rollout's own rounding, nothing compensated. A row of the down projection's input counts for the
    experts that its token uses.

    Args:
      plan: of the rollout.
      params: float32 masters.
      multipliers: static multipliers of the plan's sites.
      sequences: token ids; padding never counts.
      fraction: share of the channels, rounded up to whole blocks; 0 and 1 leave no choice and need no sequences.

    Raises:
      UserError: there is no token.
    """
    counts = channel_counts(site_sizes(policy), plan, fraction)
    if fraction in (0, 1):
        return {site: np.tile(np.arange(count, dtype=np.int32), (policy.config.num_layers, 1)) for site, count in counts.items()}
    rounded = with_rounded_experts(params, fmt=plan.weights, dtype=policy.compute_dtype)
    # Sorted rows are those of the experts that are used; the engine's own plan, because the weights are rounded already.
    static = {"policy": replace(policy, experts_implementation="ragged"), "plan": replace(plan, weights="bf16")}
    total = dict.fromkeys(counts, np.float64(0))
    for tokens, segments in _padded_batches(_not_empty(sequences)):
        energy = to_host(_residual_energy(rounded, multipliers, jnp.asarray(tokens), jnp.asarray(segments), **static))
        total = {site: value + energy[site].astype(np.float64) for site, value in total.items()}
    return {
        site: _over_all_layers(largest_channels(np.asarray(total[site]), count), policy.config.layers_of(site), policy.config.num_layers)
        for site, count in counts.items()
    }


def _over_all_layers(values: Shaped[np.ndarray, " Ls *width"], layer_ids: tuple[int, ...], count: int) -> Shaped[np.ndarray, " L *width"]:
    """Values of the layers that have a site, with zeros for those that do not."""
    full = np.zeros((count, *values.shape[1:]), values.dtype)
    full[list(layer_ids)] = values
    return full


def site_sizes(policy: Policy) -> dict[str, int]:
    """Widths of the sites that can be compensated."""
    return {"expert_input": policy.config.hidden_size, "down_input": policy.config.expert_hidden_size}


def _not_empty(sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    found = [tokens for tokens in sequences if len(tokens)]
    if not found:
        raise UserError("calibration has no prompts; raise calibration.prompts or give the task more rows")
    return found


def _equal_length_batches(sequences: Sequence[Sequence[int]]) -> list[Int32[np.ndarray, "rows width"]]:
    """Stacks windows of equal width, so that no pad token enters the statistics.

    The width is the largest power of two that a sequence holds; a first and a last window cover it whole.
    """
    by_width: dict[int, list[Sequence[int]]] = {}
    for tokens in sequences:
        width = 1 << (len(tokens).bit_length() - 1)
        by_width.setdefault(width, []).append(tokens[:width])
        if len(tokens) > width:
            by_width[width].append(tokens[-width:])
    batches = []
    for width, rows in sorted(by_width.items()):
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            part = list(part) + [part[0]] * (ROWS - len(part))
            batches.append(np.asarray(part, np.int32).reshape(ROWS, width))
    return batches


def _padded_batches(
    sequences: Sequence[Sequence[int]],
) -> Iterator[tuple[Int32[np.ndarray, "rows width"], Int32[np.ndarray, "rows width"]]]:
    """Every sequence once: token ids, padded to a power of two, and segment ids, 0 where there is no token."""
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), ROWS):
        part = ordered[start : start + ROWS]
        tokens = np.zeros((ROWS, 1 << (len(part[-1]) - 1).bit_length()), np.int32)
        segments = np.zeros_like(tokens)
        for row, sequence in enumerate(part):
            tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
        yield tokens, segments


@functools.partial(jax.jit, static_argnames=("policy",))
def _amax(params: Params, tokens: Int[Array, "B T"], *, policy: Policy) -> dict[str, Float[Array, " L"]]:
    inputs = _inputs(tokens, jnp.ones_like(tokens), {})
    return policy.forward(params, inputs, policy.options(UNQUANTIZED, observe="amax")).observed


@functools.partial(jax.jit, static_argnames=("policy", "stack"))
def _layer_amax(
    params: Params, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], *, policy: Policy, stack: Stack
) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, " one"]]]:
    inputs = _inputs(tokens, jnp.ones_like(tokens), {})
    options = policy.options(UNQUANTIZED, observe="amax")
    x, reports = apply_layer(policy.family, policy.config, params, stack, x, inputs, options)
    return x, reports["observed"]


@functools.partial(jax.jit, static_argnames=("policy", "plan"))
def _residual_energy(
    params: Params, multipliers: Multipliers, tokens: Int[Array, "B T"], segments: Int[Array, "B T"], *, policy: Policy, plan: QuantPlan
) -> dict[str, Float[Array, "L _"]]:
    inputs = _inputs(tokens, segments, multipliers)
    return policy.forward(params, inputs, policy.options(plan, observe="residual")).observed


def _inputs(tokens: Int[Array, "B T"], segments: Int[Array, "B T"], multipliers: Multipliers) -> ForwardInputs:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return ForwardInputs(tokens, positions, causal_mask(positions, segments), multipliers)
