"""Reading one checkpoint folder: what is complete, what is damaged, and the arrays.

Files are compared with the manifest before they are read, so that damage ends in one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, config_from_dict, param_shapes
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import SITES
from trace_jax.sharding.mesh import replicated
from trace_jax.sharding.rules import shardings
from trace_jax.train.manifest import find_damage

FORMAT_VERSION = 1


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order; none if there is no such folder."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def locate_checkpoint(path: Path) -> Path:
    """The folder of one checkpoint: that of a step, or of the last complete one of a run or checkpoint folder.

    Raises:
      UserError: there is no complete checkpoint at the path.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or directory; give a run directory or a checkpoint")
    if path.name.isdigit() and any((path / item).is_dir() for item in ("params", "meta")):
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = complete_steps(root)
    if steps:
        return root / str(steps[-1])
    if root != path or path.name == "checkpoints":
        raise UserError(f"{path}: no complete checkpoint in {root}; train first, or point to a run directory")
    raise UserError(f"{path}: neither a run directory (with checkpoints/) nor an Orbax checkpoint; for a Hugging Face directory use import")


def tokenizer_of(folder: Path, meta: dict[str, Any]) -> str:
    """What `load_tokenizer` takes for the policy of a checkpoint folder."""
    carried = folder.absolute().parent.parent / meta["tokenizer"]  # beside checkpoints/, where import puts it
    return str(carried) if carried.is_dir() else meta["tokenizer"]


def describe_policy(policy: Policy) -> dict[str, Any]:
    """The policy as JSON."""
    return {
        "family": policy.family,
        "config": policy.config.to_dict(),
        "compute_dtype": policy.compute_dtype,
        "experts_implementation": policy.experts_implementation,
    }


def policy_from_meta(meta: dict[str, Any]) -> Policy:
    """Inverts `describe_policy`."""
    stored = meta["policy"]
    config = config_from_dict(stored["family"], stored["config"])
    return Policy(stored["family"], config, stored["compute_dtype"], stored["experts_implementation"])


def read_meta(folder: Path) -> dict[str, Any]:
    """The JSON document of one checkpoint, checked for its format version.

    Raises:
      UserError: it is damaged or has another format version.
    """
    require_undamaged(folder, "meta")
    try:
        meta = json.loads((folder / "meta" / "metadata").read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(folder, "meta is missing or not JSON") from error
    found = meta.get("format_version") if isinstance(meta, Mapping) else None
    if found != FORMAT_VERSION:
        raise UserError(f"{folder}: checkpoint format {found} is not {FORMAT_VERSION}; re-create it with this version")
    return dict(meta)


def restore_policy(folder: Path, meta: dict[str, Any], mesh: Mesh | None = None) -> tuple[Params, Multipliers]:
    """The parameters and multipliers of one checkpoint, divided over a mesh if one is given, whatever mesh saved them.

    Raises:
      UserError: they are damaged, or the mesh does not divide them.
    """
    policy = policy_from_meta(meta)
    shapes = param_shapes(policy.family, policy.config)
    params = restore_item(folder, "params", shapes, None if mesh is None else shardings(shapes, mesh))
    return params, restore_multipliers(folder, meta, mesh)


def restore_multipliers(folder: Path, meta: dict[str, Any], mesh: Mesh | None = None) -> Multipliers:
    """The static multipliers of one checkpoint, whole on every device; empty if it was never calibrated.

    Raises:
      UserError: they are damaged.
    """
    per_layer = jax.ShapeDtypeStruct((policy_from_meta(meta).config.num_layers,), jnp.float32)
    sites = [site for site in SITES if site in meta["sites"]]
    placed = None if mesh is None else dict.fromkeys(sites, replicated(mesh))
    return restore_item(folder, "multipliers", dict.fromkeys(sites, per_layer), placed) if sites else {}


def restore_channels(meta: Mapping[str, Any]) -> Channels:
    """The compensated channels of one checkpoint; empty where nothing was compensated."""
    return {site: np.asarray(ids, np.int32) for site, ids in meta.get("channels", {}).items()}


def restore_item(folder: Path, item: str, shapes: Any, placed: Any = None) -> Any:
    """One item of a checkpoint with the shapes and dtypes of the tree `shapes`.

    Args:
      placed: a sharding for each leaf of `shapes`; None puts everything on the first device.

    Raises:
      UserError: it is damaged.
    """
    require_undamaged(folder, item)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(lambda _: device, shapes) if placed is None else placed
    abstract = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, placed)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.restore((folder / item).absolute(), args=ocp.args.StandardRestore(abstract))
    except Exception as error:  # Orbax wraps what its storage raises in a bare Exception
        raise damaged(folder, f"{item} cannot be read") from error


def require_undamaged(folder: Path, item: str) -> None:
    """Compares the files of an item with the manifest.

    Raises:
      UserError: one of them is not as it was saved.
    """
    damage = find_damage(folder, item)
    if damage is not None:
        raise damaged(folder, damage)


def damaged(folder: Path, damage: str) -> UserError:
    """The user's line for a damaged checkpoint, with the checkpoint to fall back to."""
    others = [step for step in complete_steps(folder.parent) if str(step) != folder.name]
    earlier = [step for step in others if step < int(folder.name)]
    remedy = (
        f"remove the folder {folder} to go on from step {max(earlier or others)}"
        if others
        else f"there is no other checkpoint in {folder.parent}, start again from its source with another --out"
    )
    return UserError(f"{folder}: {damage}; {remedy}")
