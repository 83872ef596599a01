"""Orbax checkpoints: params, optimizer, multipliers and one JSON document, each an item of its own.

`checkpoints/<step>/{params,optimizer,multipliers,meta}`. Orbax writes a step under a temporary name and renames it when
all items are complete, so an interrupted save is never taken for a checkpoint. The JSON holds counters, data position,
the policy's description and the resolved config of the run.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, config_from_dict, param_shapes
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import SITES
from trace_jax.train.state import TrainState

FORMAT_VERSION = 1
ITEMS = ("params", "optimizer", "multipliers", "meta")


@dataclass(frozen=True)
class Progress:
    """Counters of a run.

    Args:
      step: finished steps of the loop.
      version: optimizer updates behind the parameters.
      data_position: prompts taken from the training stream.
      samples: sequences requested so far; the next sample id.
      seed: seed of the run; every random stream is derived from it and from the counters.
    """

    step: int = 0
    version: int = 0
    data_position: int = 0
    samples: int = 0
    seed: int = 0


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where they go; created on the first save.
      keep: number of latest checkpoints to keep; None keeps all.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        self.directory, self._keep = directory, keep

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Made on first use, because it creates the directory: a run that fails before must leave nothing."""
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, create=True, enable_async_checkpointing=True)
        return ocp.CheckpointManager(self.directory.absolute(), options=options)

    def latest(self) -> int | None:
        """Step of the last complete checkpoint, None when there is none."""
        return self._manager.latest_step() if self.directory.is_dir() else None

    def save(self, state: TrainState, progress: Progress, policy: Policy, tokenizer: str, config: dict[str, Any]) -> None:
        """Starts saving in the background; arrays are copied first, so training may go on and reuse its buffers."""
        if self._manager.latest_step() == progress.step:
            return
        params, opt_state, multipliers = jax.tree.map(jnp.copy, (state.params, state.opt_state, state.multipliers))
        meta = {
            "format_version": FORMAT_VERSION,
            "progress": asdict(progress),
            "policy": describe_policy(policy),
            "tokenizer": tokenizer,
            "sites": sorted(multipliers),
            "config": config,
        }
        with self._full_disk_reported():
            self._manager.save(
                progress.step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    optimizer=ocp.args.StandardSave(opt_state),
                    # Orbax refuses an empty item; a policy that needs no multipliers stores an empty list of sites instead.
                    multipliers=ocp.args.StandardSave(multipliers or {"none": jnp.zeros(1, jnp.float32)}),
                    meta=ocp.args.JsonSave(meta),
                ),
            )

    def wait(self) -> None:
        """Blocks until the save in flight is complete; raises what it raised."""
        if "_manager" in vars(self):
            with self._full_disk_reported():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes and releases the manager."""
        if "_manager" in vars(self):
            with self._full_disk_reported():
                self._manager.close()

    @contextmanager
    def _full_disk_reported(self) -> Iterator[None]:
        """Turns a full disk, which Orbax reports as a ValueError of its storage library, into the user's line."""
        try:
            yield
        except (OSError, ValueError) as error:
            if "No space left" not in str(error) and "Disk quota" not in str(error):
                raise
            for partial in self.directory.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{self.directory}: no space left while saving a checkpoint; free some space and go on with --resume "
                f"(last complete checkpoint: step {self._manager.latest_step()})"
            ) from error

    def restore(self, step: int, optimizer: optax.GradientTransformation) -> tuple[Policy, TrainState, Progress]:
        """Policy, state and counters of a complete checkpoint.

        Raises:
          UserError: the checkpoint is damaged or was made by another format version.
        """
        meta = read_meta(self._manager, step, self.directory)
        policy = policy_from_meta(meta)
        optimizer_shape = jax.eval_shape(optimizer.init, param_shapes(policy.family, policy.config))
        params, multipliers = _restore_policy(self._manager, step, meta, self.directory)
        opt_state = _restore_item(self._manager, step, "optimizer", optimizer_shape, self.directory)
        return policy, TrainState(params, opt_state, multipliers), Progress(**meta["progress"])


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy read from disk: static description, float32 masters, multipliers (empty if never calibrated), tokenizer and meta."""

    policy: Policy
    params: Params
    multipliers: Multipliers
    tokenizer: str
    meta: dict[str, Any]


def load_policy(path: Path | str) -> LoadedPolicy:
    """Reads the policy of a run directory, a checkpoint directory, or one step of it.

    Raises:
      UserError: there is no complete checkpoint at the path.
    """
    root, step = _locate(Path(path))
    manager = ocp.CheckpointManager(
        root.absolute(), options=ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
    )
    try:
        step = manager.latest_step() if step is None else step
        if step is None:
            raise UserError(f"{path}: no complete checkpoint in {root}; train first, or point to a run directory")
        meta = read_meta(manager, step, root)
        params, multipliers = _restore_policy(manager, step, meta, root)
    finally:
        manager.close()
    return LoadedPolicy(policy_from_meta(meta), params, multipliers, meta["tokenizer"], meta)


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


def read_meta(manager: ocp.CheckpointManager, step: int, directory: Path) -> dict[str, Any]:
    """The JSON document of a step, checked for its format version."""
    try:
        meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(directory, step, "meta", error) from error
    if meta is None or meta.get("format_version") != FORMAT_VERSION:
        found = None if meta is None else meta.get("format_version")
        raise UserError(f"{directory}/{step}: checkpoint format {found} is not {FORMAT_VERSION}; re-create it with this version")
    return meta


def _restore_policy(manager: ocp.CheckpointManager, step: int, meta: dict[str, Any], directory: Path) -> tuple[Params, Multipliers]:
    policy = policy_from_meta(meta)
    params = _restore_item(manager, step, "params", param_shapes(policy.family, policy.config), directory)
    per_layer = jax.ShapeDtypeStruct((policy.config.num_layers,), jnp.float32)
    sites = [site for site in SITES if site in meta["sites"]]
    if not sites:
        return params, {}
    return params, _restore_item(manager, step, "multipliers", dict.fromkeys(sites, per_layer), directory)


def _restore_item(manager: ocp.CheckpointManager, step: int, item: str, shapes: Any, directory: Path) -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)}))[item]
    except Exception as error:  # Orbax wraps what its storage raises, a truncated file for instance, in a bare Exception
        raise _damaged(directory, step, item, error.__cause__ or error) from error


def _damaged(directory: Path, step: int, item: str, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{directory}/{step}/{item}: the checkpoint cannot be read ({reason}); delete that step to fall back to the one before"
    )


def _locate(path: Path) -> tuple[Path, int | None]:
    if not path.exists():
        raise UserError(f"{path}: no such file or directory; give a run directory or a checkpoint")
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    if path.name.isdigit() and (path / "params").is_dir():
        return path.parent, int(path.name)
    if path.is_dir() and any(child.name.isdigit() for child in path.iterdir()):
        return path, None
    raise UserError(f"{path}: neither a run directory (with checkpoints/) nor an Orbax checkpoint; for a Hugging Face directory use import")
