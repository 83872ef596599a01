"""Proves that an exported directory decodes to what the trainer computes with.

1. The files hold exactly the planned tensors, and config.json says exactly which modules are not quantized.
2. Experts: the oracle's decoding of the files equals `fake_quant_experts` of the float32 masters, bit for bit.
3. Everything else equals the master rounded to BF16; multipliers equal the checkpoint's, bit for bit, and are finite and positive;
   gate and up of an expert share theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from rollout_bridge.export.decode import ExportedFiles
from rollout_bridge.export.experts import expert_blocks, on_device, trainer_block
from rollout_bridge.export.layout import DTYPES, kv_scale_name, kv_site, module_of, plain_dtype, tensor_plan
from rollout_bridge.export.quant_config import quantization_config
from rollout_bridge.export.settings import ExportSettings
from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import key_map
from trace_jax.train.stored_policy import ParamSource

Multipliers = Mapping[str, np.ndarray]
Pair = tuple[str, Shaped[np.ndarray, "..."], Shaped[np.ndarray, "..."]]


def verify_export(directory: Path, policy: Policy, settings: ExportSettings, params: ParamSource, multipliers: Multipliers) -> int:
    """Compares every value of an exported directory with the checkpoint it was made from.

    Args:
      params: float32 masters on disk.
      multipliers: site -> float32 `[L]`, for `settings.sites`.

    Returns:
      Number of weights and multipliers that were compared.

    Raises:
      UserError: something differs; the line names the first tensor.
    """
    try:
        files = ExportedFiles(directory)
    except (OSError, ValueError, KeyError) as error:
        raise _failed(f"{directory}: {error}") from error
    _require_planned(directory, files, policy, settings)
    count = 0
    for name, found, expected in _pairs(files, policy, settings, params, multipliers):
        different = int(np.count_nonzero(_bits(found) != _bits(expected))) if found.shape == expected.shape else expected.size
        if different:
            raise _failed(f"{name}: {different} of {expected.size} values differ from the trainer's")
        count += expected.size
    return count


def _require_planned(directory: Path, files: ExportedFiles, policy: Policy, settings: ExportSettings) -> None:
    planned = {spec.name: (spec.dtype, spec.shape) for spec in tensor_plan(policy, settings)}
    for name in sorted(planned.keys() | files.declared.keys()):
        if planned.get(name) != files.declared.get(name):
            raise _failed(f"{name} is {files.declared.get(name)} in the files where {planned.get(name)} was planned")
    config = json.loads((directory / "config.json").read_bytes())
    if config.get("quantization_config") != quantization_config(policy, settings):
        raise _failed("quantization_config of config.json is not that of the settings")


def _pairs(files: ExportedFiles, policy: Policy, settings: ExportSettings, params: ParamSource, multipliers: Multipliers) -> Iterator[Pair]:
    """Name, found and expected values of every weight and multiplier; experts last, layer by layer."""
    entries = key_map(policy.family, policy.config)
    for entry in entries:
        if entry.is_expert:
            continue
        master = params.read(entry.path, entry.position)
        yield entry.name, files.read(entry.name), master.astype(DTYPES[plain_dtype(entry)])
        site = kv_site(entry)
        if site in settings.sites:
            name = kv_scale_name(entry, site)
            yield name, _positive(name, files.read(name)), multipliers[site][entry.layer]
    layers = settings.quantized_layers(policy.config.num_layers)
    for layer in policy.config.moe_layer_ids:
        experts = [entry for entry in entries if entry.is_expert and entry.layer == layer]
        yield from _expert_weights(files, policy, settings.format if layer in layers else "bf16", params, experts)
        if settings.format == "nvfp4" and layer in layers:
            yield from _expert_multipliers(files, experts, multipliers, settings.rounds_activations)


def _expert_weights(files: ExportedFiles, policy: Policy, fmt: str, params: ParamSource, entries: list) -> Iterator[Pair]:
    """A function of its own, so that its end lets go of the layer before the next one is read."""
    by_place = {(entry.path[-1], entry.position[1]): entry for entry in entries}
    for first, masters in expert_blocks(policy, params, entries[0].layer):
        for name, expected in trainer_block(on_device(masters), fmt=fmt)._asdict().items():
            for index, weight in enumerate(np.asarray(expected).astype(ml_dtypes.bfloat16), start=first):
                entry = by_place[name, index]
                yield entry.name, files.decode(module_of(entry)), weight


def _expert_multipliers(files: ExportedFiles, entries: list, multipliers: Multipliers, activations: bool) -> Iterator[Pair]:
    sites = {"gate": "expert_input", "up": "expert_input", "down": "down_input"}
    by_place = {(entry.path[-1], entry.position[1]): entry for entry in entries}
    for entry in entries:
        module, projection = module_of(entry), entry.path[-1]
        name = f"{module}.weight_scale_2"
        partner = by_place["gate" if projection == "up" else projection, entry.position[1]]
        shared = f"{module_of(partner)}.weight_scale_2"
        yield name, _positive(name, files.read(name)), files.read(shared)
        if activations:
            name = f"{module}.input_scale"
            yield name, _positive(name, files.read(name)), multipliers[sites[projection]][entry.layer]


def _positive(name: str, values: np.ndarray) -> np.ndarray:
    if not (np.isfinite(values) & (values > 0)).all():
        raise _failed(f"{name} is {values}, not finite and positive")
    return values


def _bits(values: np.ndarray | np.generic) -> np.ndarray:
    array = np.ascontiguousarray(values)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def _failed(what: str) -> UserError:
    return UserError(f"verification failed: {what}; do not use this export: check the disk and export again")
