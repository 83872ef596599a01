"""The tensors of an export, made layer by layer from a checkpoint on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from pallas_kernels import Quantized
from pallas_kernels.formats import E4M3_NAN, E8M0_NAN
from rollout_bridge.export.experts import HostWeights, expert_blocks, on_device, quantized_block
from rollout_bridge.export.layout import DTYPES, is_quantized, kv_scale_name, kv_site, module_of, plain_dtype
from rollout_bridge.export.settings import ExportSettings
from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import key_map
from trace_jax.models.tensor_files import narrowed
from trace_jax.train.stored_policy import ParamSource

Named = tuple[str, Shaped[np.ndarray, "..."]]
INPUT_SITES = {"gate": "expert_input", "up": "expert_input", "down": "down_input"}
"""Projection of an expert -> the activation site that it reads."""


def encoded_tensors(
    policy: Policy, settings: ExportSettings, params: ParamSource, multipliers: Mapping[str, np.ndarray]
) -> Iterator[Named]:
    """Every tensor of `tensor_plan`, in the types of the file; a layer's experts are held at once, and nothing of another layer.

    Args:
      params: float32 masters on disk.
      multipliers: site -> float32 `[L]`, for `settings.sites`.

    Raises:
      UserError: a weight is not finite in BF16.
    """
    layers = settings.quantized_layers(policy.config.num_layers)
    for layer, entries in itertools.groupby(key_map(policy.family, policy.config), key=lambda entry: entry.layer):
        experts = []
        for entry in entries:
            if entry.is_expert:
                experts.append(entry)
                continue
            yield entry.name, narrowed(entry.name, params.read(entry.path, entry.position), DTYPES[plain_dtype(entry)])
            site = kv_site(entry)
            if site in settings.sites:
                yield kv_scale_name(entry, site), multipliers[site][layer]
        if experts:
            yield from _experts_of_layer(policy, settings, params, multipliers, experts, is_quantized(experts[0], layers))


def _experts_of_layer(
    policy: Policy,
    settings: ExportSettings,
    params: ParamSource,
    multipliers: Mapping[str, np.ndarray],
    entries: Sequence[Any],
    quantized: bool,
) -> Iterator[Named]:
    """A function of its own, so that its end lets go of the layer before the next one is read."""
    by_place = {(entry.path[-1], entry.position[1]): entry for entry in entries}
    for first, masters in expert_blocks(policy, params, entries[0].layer):
        if quantized:
            yield from _quantized(settings, by_place, first, masters, multipliers)
        else:
            yield from _plain(by_place, first, masters)


def _plain(entries: Mapping[tuple[Any, int], Any], first: int, masters: HostWeights) -> Iterator[Named]:
    for name, weights in masters.items():
        for index, weight in enumerate(weights, start=first):
            entry = entries[name, index]
            yield entry.name, narrowed(entry.name, weight, DTYPES["BF16"])


def _quantized(
    settings: ExportSettings,
    entries: Mapping[tuple[Any, int], Any],
    first: int,
    masters: HostWeights,
    multipliers: Mapping[str, np.ndarray],
) -> Iterator[Named]:
    for name, block in jax.device_get(quantized_block(on_device(masters), fmt=settings.format)).items():
        for offset in range(block.codes.shape[0]):
            entry = entries[name, first + offset]
            _require_finite(entry.name, block, offset)
            module = module_of(entry)
            if block.multiplier is None:
                yield f"{module}.weight_packed", block.codes[offset]
                yield f"{module}.weight_scale", block.scales[offset]
            else:
                yield f"{module}.weight", block.codes[offset]
                yield f"{module}.weight_scale", block.scales[offset].view(DTYPES["F8_E4M3"])
                yield f"{module}.weight_scale_2", block.multiplier[offset, 0]
                if settings.rounds_activations:
                    yield f"{module}.input_scale", multipliers[INPUT_SITES[name]][entry.layer]


def _require_finite(name: str, block: Quantized, offset: int) -> None:
    if (block.scales[offset] == (E4M3_NAN if block.fmt.scale == "e4m3" else E8M0_NAN)).any():
        raise UserError(f"{name} holds NaN, infinity or a value too large for bfloat16; take an earlier checkpoint")
