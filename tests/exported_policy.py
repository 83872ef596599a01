"""A checkpoint with awkward experts, and an export of it, for the tests of the exporter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tiny_policy import CONFIG, policy

from rollout_bridge.export import ExportSettings
from rollout_bridge.export.decode import ExportedFiles
from trace_jax.config import from_mapping
from trace_jax.models.registry import ModelConfig, Params, param_shapes
from trace_jax.quantization.multipliers import Multipliers, site_multiplier
from trace_jax.quantization.plan import SITES
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.state import TrainState

SHARD_BYTES = 60_000


class Export(NamedTuple):
    """An exported directory, how it was made, and what the exporter reported."""

    path: Path
    settings: ExportSettings
    result: dict[str, Any]

    @property
    def files(self) -> ExportedFiles:
        return ExportedFiles(self.path)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())


def multipliers(layers: int = CONFIG.num_layers) -> Multipliers:
    """Stored multipliers: another one for every site and layer."""
    amax = {site: np.geomspace(3.0, 90.0, layers) * (1 + index) ** 3 for index, site in enumerate(SITES)}
    return {site: site_multiplier(site, jnp.asarray(values, jnp.float32)) for site, values in amax.items()}


def random_params(config: ModelConfig = CONFIG) -> Params:
    """Random float32 masters as NumPy arrays."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) / 8, param_shapes(config.FAMILY, config))


def awkward() -> Params:
    """Masters with experts that other exporters got wrong."""
    tree = random_params()
    experts = tree["groups"][0]["experts"]
    for name in ("gate", "up", "down"):
        experts[name][1, 2] = 0.0  # never trained
    experts["up"][0, 3] *= 64.0  # alone, gate would take another multiplier
    experts["gate"][0, 1] *= 0.02 / np.abs(experts["gate"][0, 1]).max()
    experts["gate"][0, 1, 0, :16] = 3e-5 * np.linspace(-1, 1, 16)
    experts["down"][2, 0] = 0.0
    experts["down"][2, 0, 0, :16] = 1e30  # one huge block among zeros
    experts["gate"][2, 4] /= np.abs(experts["gate"][2, 4]).max()
    for row, largest in enumerate((3e-6, 5e-6, 1e-5, 2e-5)):  # block scales 2^-9 to 2^-7 under the multiplier 2^-11
        experts["gate"][2, 4, row, :16] = largest * np.linspace(-1, 1, 16)
    return tree


def save(folder: Path, masters: Params, scales: dict[str, Any], config: ModelConfig = CONFIG, tokenizer: str = "ascii") -> Path:
    """A run directory with one checkpoint."""
    stored = from_mapping({"model": {"family": config.FAMILY, "config": config.to_dict()}, "tokenizer": tokenizer}).model_dump(mode="json")
    state = TrainState(jax.tree.map(jnp.asarray, masters), {"none": jnp.zeros(1)}, jax.tree.map(jnp.asarray, scales))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(state, Progress(version=3), policy(config=config), tokenizer, stored)
    checkpoints.close()
    return folder
