"""A checkpoint saved on eight devices, restored on others; prints what was found as JSON.

A program of its own, as `on_meshes.py`: `python checkpoints_on_meshes.py FOLDER`, with eight CPU devices.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from on_meshes import OPTIMIZER, policy_of, rollout, tiny

from rollout_bridge.export import ExportSettings, export_checkpoint
from trace_jax.config import from_mapping
from trace_jax.sharding.mesh import device_mesh
from trace_jax.sharding.placement import put_params
from trace_jax.sharding.rules import shardings
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.state import TrainState, initial_state
from trace_jax.train.update import UpdateSettings, measure, update_policy

SAVED_ON = {"data": 2, "fsdp": 2, "expert": 2}
OTHERS: list[dict[str, int]] = [{}, {"fsdp": 2}, {"expert": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}]
CONTINUED_ON = {"expert": 2, "tensor": 2}
"""Of 1, 2, 4 and 8 devices, and where training goes on; that costs a compilation."""


def main(folder: Path) -> dict[str, Any]:
    """Saves, restores everywhere, goes on in some places, and exports."""
    policy, params, multipliers = policy_of()
    plan = tiny.PLANS["nvfp4"]
    trajectories = rollout(policy, plan, params, multipliers)
    settings = UpdateSettings(ObjectiveSpec(policy, tiny.guided(plan)), 8 * 32, 28)
    advantages = np.random.default_rng(1).normal(size=trajectories.num_sequences).astype(np.float32)
    config = from_mapping({"model": {"config": policy.config.to_dict()}, "tokenizer": "ascii"}).model_dump(mode="json")

    def step(state: TrainState) -> TrainState:
        measured = measure(state.params, state.multipliers, trajectories, settings, advantages=advantages)
        return update_policy(state, measured, OPTIMIZER).state

    def save(state: TrainState, name: str) -> Checkpoints:
        checkpoints = Checkpoints(folder / name)
        checkpoints.save(state, Progress(step=1, version=1), policy, "ascii", config)
        checkpoints.close()
        return checkpoints

    mesh = device_mesh(SAVED_ON)
    assert mesh is not None
    state = step(initial_state(put_params(mesh, params), OPTIMIZER, multipliers))
    saved, alone = save(state, "mesh"), save(jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), state), "alone")
    after = step(state)
    found: dict[str, Any] = {"again": _difference(step(saved.restore(1, OPTIMIZER, mesh)[1]), after)}
    for sizes in OTHERS:
        count = int(np.prod(list(sizes.values()), dtype=int))
        other = device_mesh(sizes, jax.devices()[:count])
        with nullcontext() if other is None else jax.set_mesh(other):  # inside and outside of a mesh's context
            restored = saved.restore(1, OPTIMIZER, other)[1]
        placed = all(
            leaf.devices() == {jax.devices()[0]} if wanted is None else leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
            for part in (restored.params, restored.opt_state)
            for leaf, wanted in zip(jax.tree.leaves(part), _wanted(part, other), strict=True)
        )
        result: dict[str, Any] = {"equal": _difference(restored, state) == 0.0, "placed": placed}
        if sizes == CONTINUED_ON:
            result["after"] = _difference(step(restored), after)
        found[f"{count}: {sizes}"] = result
    exported = [_export(checkpoints.directory, folder / f"{checkpoints.directory.name}-hf") for checkpoints in (saved, alone)]
    found["export"] = exported[0] == exported[1] and len(exported[0]) > 3
    return found


def _wanted(part: Any, mesh: jax.sharding.Mesh | None) -> list[Any]:
    return [None] * len(jax.tree.leaves(part)) if mesh is None else jax.tree.leaves(shardings(part, mesh))


def _difference(one: TrainState, other: TrainState) -> float:
    pairs = zip(jax.tree.leaves(jax.device_get(one)), jax.tree.leaves(jax.device_get(other)), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))) for a, b in pairs)


def _export(checkpoint: Path, out: Path) -> dict[str, bytes]:
    """Exports a checkpoint; its files by name."""
    export_checkpoint(checkpoint, out, ExportSettings("nvfp4"))
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
