"""Orbax checkpoints: params, optimizer, multipliers and one JSON document, each an item of its own.

`checkpoints/<step>/{params,optimizer,multipliers,meta,manifest.json}` (no optimizer where nothing was trained), and `served` where the
rollout engine has older weights than `params` (`sync.every`), because the steps that follow depend on them. Orbax writes a step under a
temporary name and renames it when it is whole, so whatever has a number for a name is complete. The JSON holds counters, data position,
the policy's description, compensated channels and the resolved config of the run; the manifest holds a checksum of every file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from trace_jax.errors import UserError
from trace_jax.files import is_full_disk
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, param_shapes
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.sharding.processes import gathered, is_first, on_first
from trace_jax.sharding.rules import shardings
from trace_jax.train.manifest import write_manifest
from trace_jax.train.read_checkpoint import (
    FORMAT_VERSION,
    complete_steps,
    describe_policy,
    locate_checkpoint,
    policy_from_meta,
    read_meta,
    restore_item,
    restore_policy,
    tokenizer_of,
)
from trace_jax.train.state import PolicyVersion, TrainState

UNFINISHED = ".orbax-checkpoint-tmp*"
"""Ends of the names of what Orbax has not finished, or what a killed program left of a save."""

SPARE_BYTES = 1 << 20
"""Room beside the arrays of a checkpoint, for metadata."""


@dataclass(frozen=True)
class Progress:
    """Counters of a run.

    Args:
      step: finished steps of the loop.
      version: optimizer updates behind the parameters.
      data_position: prompts taken from the training stream.
      samples: sequences requested so far; the next sample id.
      seed: seed of the run; every random stream is derived from it and from the counters.
      skipped_in_a_row: last updates that were refused because their gradient was not finite.
    """

    step: int = 0
    version: int = 0
    data_position: int = 0
    samples: int = 0
    seed: int = 0
    skipped_in_a_row: int = 0


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where they go; created on the first save.
      keep: number of latest checkpoints to keep; None keeps all.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        self.directory, self._keep = directory, keep
        self._manager: ocp.CheckpointManager | None = None
        self._saving = -1

    def _open(self) -> ocp.CheckpointManager:
        """The manager, made on first use, because it creates the directory: a run that fails before must leave nothing."""
        if self._manager is None:
            # Folders are made before `save` returns: Orbax's threads wait for those that cannot be made, and the program does not end.
            seal = ocp.options.AsyncOptions(post_finalization_callback=self._seal, create_directories_asynchronously=False)
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=True, async_options=seal)
            self._manager = ocp.CheckpointManager(self.directory.absolute(), options=options)
        return self._manager

    def _seal(self) -> None:
        """Lists the files of the step that Orbax has written and is about to rename; runs in its thread."""
        for unfinished in self.directory.glob(f"{self._saving}{UNFINISHED}") if is_first() else ():
            write_manifest(unfinished)

    def latest(self) -> int | None:
        """Step of the last complete checkpoint, None when there is none."""
        return max(complete_steps(self.directory), default=None)

    def remove_unfinished(self) -> None:
        """Removes what a killed program left of a save; only for the program that owns the run."""
        for unfinished in self.directory.glob(f"*{UNFINISHED}"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def save(
        self,
        state: TrainState,
        progress: Progress,
        policy: Policy,
        tokenizer: str,
        config: dict[str, Any],
        served: PolicyVersion | None = None,
        channels: Channels | None = None,
    ) -> None:
        """Starts saving in the background; arrays are copied first, so training may go on and reuse its buffers.

        Args:
          served: the weights that the engine has, stored where they are not those of `state`.
          channels: what the rollout's residual compensation takes.

        One save at most is under way: this one waits for the one before, so a kill loses no more than what came after the
        last complete checkpoint, which is the last save or the one before it.
        """
        self.wait()
        if gathered(progress.step in complete_steps(self.directory))[0]:
            return
        behind = {} if served is None or served.version == progress.version else {"served": served.params}
        params, opt_state, multipliers, behind = jax.tree.map(jnp.copy, (state.params, state.opt_state, state.multipliers, behind))
        meta = {
            "format_version": FORMAT_VERSION,
            "progress": asdict(progress),
            "policy": describe_policy(policy),
            "tokenizer": tokenizer,
            "sites": sorted(multipliers),
            "channels": {site: np.asarray(ids).tolist() for site, ids in (channels or {}).items()},
            "config": config,
            "served_version": progress.version if served is None else served.version,
        }
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params, save_args=_layer_by_layer(params)),
            # Orbax refuses an empty item; a policy that needs no multipliers stores an empty list of sites instead.
            multipliers=ocp.args.StandardSave(multipliers or {"none": jnp.zeros(1, jnp.float32)}),
            meta=ocp.args.JsonSave(meta),
            **({"optimizer": ocp.args.StandardSave(opt_state)} if jax.tree.leaves(opt_state) else {}),
            **{name: ocp.args.StandardSave(weights) for name, weights in behind.items()},
        )
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state, multipliers, behind)))
        on_first(lambda: self._require_space(needed))
        self._saving = progress.step
        with self._full_disk_reported():
            self._open().save(progress.step, args=items)

    def wait(self) -> None:
        """Blocks until the save under way is complete; raises what it raised, a full disk as the user's line."""
        if self._manager is not None:
            with self._full_disk_reported():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes the save under way and releases the manager."""
        if self._manager is not None:
            with self._full_disk_reported():
                self._manager.close()

    def _require_space(self, needed: int) -> None:
        """Refuses a save that cannot fit before it begins: the storage library reports a full disk in hundreds of lines."""
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        if shutil.disk_usage(existing).free < needed + SPARE_BYTES:
            raise self._no_space()

    @contextmanager
    def _full_disk_reported(self) -> Iterator[None]:
        """Turns a disk that fills up during a save into the user's line."""
        try:
            yield
        except (OSError, ValueError, UserError) as error:
            if not is_full_disk(error):
                raise
            self.remove_unfinished()
            raise self._no_space() from error

    def _no_space(self) -> UserError:
        last = self.latest()
        remedy = "start again" if last is None else f"go on with --resume (last complete checkpoint: step {last})"
        return UserError(f"{self.directory}: no space left to save a checkpoint; free some space and {remedy}")

    def restore(self, step: int, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> tuple[Policy, TrainState, Progress]:
        """Policy, state and counters of a complete checkpoint, divided over a mesh if one is given, whatever mesh saved them.

        Raises:
          UserError: the checkpoint is damaged or was made by another format version, or the mesh does not divide it.
        """
        folder = self.directory / str(step)
        meta = read_meta(folder)
        policy = policy_from_meta(meta)
        optimizer_shape = jax.eval_shape(optimizer.init, param_shapes(policy.family, policy.config))
        params, multipliers = restore_policy(folder, meta, mesh)
        opt_state = restore_item(folder, "optimizer", optimizer_shape, None if mesh is None else shardings(optimizer_shape, mesh))
        return policy, TrainState(params, opt_state, multipliers), Progress(**meta["progress"])

    def restore_served(self, step: int, mesh: Mesh | None = None) -> PolicyVersion | None:
        """The weights that the engine had when a checkpoint was made; None where they were those of the checkpoint.

        Raises:
          UserError: as `restore`.
        """
        folder = self.directory / str(step)
        meta = read_meta(folder)
        version = meta.get("served_version", meta["progress"]["version"])  # older checkpoints brought the engine up to date
        if version == meta["progress"]["version"]:
            return None
        policy = policy_from_meta(meta)
        shapes = param_shapes(policy.family, policy.config)
        return PolicyVersion(restore_item(folder, "served", shapes, None if mesh is None else shardings(shapes, mesh)), version)


def _layer_by_layer(params: Params) -> Any:
    """How each parameter is stored: stacked layers as a piece per layer, so that an exporter reads one without the others."""
    whole, pieces = ocp.SaveArgs(), ocp.SaveArgs(shard_axes=(0,))
    return {name: jax.tree.map(lambda _, how=pieces if name == "groups" else whole: how, part) for name, part in params.items()}


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy read from disk: static description, float32 masters, multipliers (empty if never calibrated), tokenizer and meta.

    `tokenizer` is what `load_tokenizer` takes; the copy that an imported checkpoint carries is found wherever the checkpoint lies.
    """

    policy: Policy
    params: Params
    multipliers: Multipliers
    tokenizer: str
    meta: dict[str, Any]


def load_policy(path: Path | str, mesh: Mesh | None = None) -> LoadedPolicy:
    """Reads the policy of a run directory, a checkpoint directory, or one step of it, onto one device or a mesh.

    Raises:
      UserError: there is no complete checkpoint at the path.
    """
    folder = locate_checkpoint(Path(path))
    meta = read_meta(folder)
    params, multipliers = restore_policy(folder, meta, mesh)
    return LoadedPolicy(policy_from_meta(meta), params, multipliers, tokenizer_of(folder, meta), meta)
