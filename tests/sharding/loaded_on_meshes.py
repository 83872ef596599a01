"""A Hugging Face directory, read straight onto meshes of eight CPU devices; prints what was found as JSON.

A program of its own, as `on_meshes.py`: `python loaded_on_meshes.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from on_meshes import tiny

from trace_jax.config import from_mapping
from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.registry import init_params, param_shapes
from trace_jax.sharding.mesh import device_mesh
from trace_jax.sharding.rules import shardings
from trace_jax.train import placed_params as module
from trace_jax.train.hf_policy import HfParams
from trace_jax.train.setup import initial_policy

MESHES: list[dict[str, int]] = [{}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"expert": 4, "tensor": 2}]


class Held:
    """Bytes of the largest tensor that was read, and of the largest share of a device."""

    def __init__(self) -> None:
        self.tensor = self.share = 0
        read, share = HfParams.read, module._share

        def watched_read(params: HfParams, *place: Any) -> np.ndarray:
            values = read(params, *place)
            self.tensor = max(self.tensor, values.nbytes)
            return values

        def watched_share(*arguments: Any) -> np.ndarray:
            values = share(*arguments)
            self.share = max(self.share, values.nbytes)
            return values

        HfParams.read, module._share = watched_read, watched_share


def main(folder: Path) -> dict[str, Any]:
    """Loads everywhere through `initial_policy` and compares with the whole checkpoint."""
    model = replace(tiny.CONFIG, num_layers=4, num_kv_heads=2, num_experts=8, expert_hidden_size=256, vocab_size=131)
    made = init_params("qwen3_moe", model, jax.random.key(3))
    save_hf_directory(folder / "hf", "qwen3_moe", model, jax.tree.map(np.asarray, made), dtype="float32")
    whole, shapes = load_hf_directory(folder / "hf").params, param_shapes("qwen3_moe", model)
    held = Held()
    found: dict[str, Any] = {"experts": 4 * 4 * 8 * model.hidden_size * model.expert_hidden_size}
    for sizes in MESHES:
        values = {"model": {"source": str(folder / "hf")}, "tokenizer": "ascii", "mesh": sizes, "task": {"params": {"size": 40}}}
        held.tensor = held.share = 0
        setup, params, _ = initial_policy(from_mapping(values))
        setup.task.close()
        mesh = device_mesh(sizes)
        expected = None if mesh is None else shardings(shapes, mesh)
        found[json.dumps(sizes)] = {
            "equal": all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), params, whole))),
            "placed": mesh is None or all(jax.tree.leaves(jax.tree.map(lambda a, where: a.sharding == where, params, expected))),
            "random_equal": all(
                jax.tree.leaves(
                    jax.tree.map(lambda a, b: np.array_equal(a, b), init_params("qwen3_moe", model, jax.random.key(3), expected), made)
                )
            ),
            **{"tensor": held.tensor, "share": held.share},
        }
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
