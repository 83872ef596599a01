"""Orbax checkpoints: params, optimizer, multipliers and one JSON document, each an item of its own.

`checkpoints/<step>/{params,optimizer,multipliers,meta,manifest.json}`. A step is written under a temporary name and renamed
when it is whole, so whatever has a number for a name is complete. The JSON holds counters, data position, the policy's
description and the resolved config of the run; the manifest holds a checksum of every file.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from trace_jax.errors import UserError
from trace_jax.files import flush_to_disk
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, param_shapes
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.train.manifest import write_manifest
from trace_jax.train.read_checkpoint import (
    FORMAT_VERSION,
    complete_steps,
    describe_policy,
    policy_from_meta,
    read_meta,
    restore_item,
    restore_policy,
)
from trace_jax.train.state import TrainState

UNFINISHED = ("*.partial*", "*.orbax-checkpoint-tmp*")
"""Names of what a killed program leaves of a save or of a removal."""


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
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def latest(self) -> int | None:
        """Step of the last complete checkpoint, None when there is none."""
        return max(complete_steps(self.directory), default=None)

    def remove_unfinished(self) -> None:
        """Removes what a killed program left of a save; only for the program that owns the run."""
        for pattern in UNFINISHED:
            for partial in self.directory.glob(pattern):
                shutil.rmtree(partial, ignore_errors=True)

    def save(self, state: TrainState, progress: Progress, policy: Policy, tokenizer: str, config: dict[str, Any]) -> None:
        """Starts saving in the background; arrays are copied first, so training may go on and reuse its buffers.

        One save at most is under way: this one waits for the one before, so a kill loses no more than what came after the
        last complete checkpoint, which is the last save or the one before it.
        """
        self.wait()
        if progress.step in complete_steps(self.directory):
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
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            optimizer=ocp.args.StandardSave(opt_state),
            # Orbax refuses an empty item; a policy that needs no multipliers stores an empty list of sites instead.
            multipliers=ocp.args.StandardSave(multipliers or {"none": jnp.zeros(1, jnp.float32)}),
            meta=ocp.args.JsonSave(meta),
        )
        self._saving = self._writer.submit(self._write, progress.step, items)

    def wait(self) -> None:
        """Blocks until the save under way is complete; raises what it raised, a full disk as the user's line."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except (OSError, ValueError, UserError) as error:  # Orbax reports a full disk as a ValueError of its storage library
            if "No space left" not in str(error) and "Disk quota" not in str(error):
                raise
            self.remove_unfinished()
            raise UserError(
                f"{self.directory}: no space left while saving a checkpoint; free some space and start again, a training run with "
                f"--resume (last complete checkpoint: {self.latest()})"
            ) from error

    def close(self) -> None:
        """Finishes the save under way and ends the thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, step: int, items: ocp.args.Composite) -> None:
        partial = self.directory / f"{step}.partial"
        self.directory.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(partial.absolute(), args=items, force=True)
        write_manifest(partial)
        partial.rename(self.directory / str(step))
        flush_to_disk(self.directory)
        for old in complete_steps(self.directory)[: -self._keep] if self._keep else ():
            # The number goes first: a kill while files are removed must not leave what looks complete.
            removed = (self.directory / str(old)).rename(self.directory / f"{old}.partial")
            shutil.rmtree(removed)

    def restore(self, step: int, optimizer: optax.GradientTransformation) -> tuple[Policy, TrainState, Progress]:
        """Policy, state and counters of a complete checkpoint.

        Raises:
          UserError: the checkpoint is damaged or was made by another format version.
        """
        folder = self.directory / str(step)
        meta = read_meta(folder)
        policy = policy_from_meta(meta)
        optimizer_shape = jax.eval_shape(optimizer.init, param_shapes(policy.family, policy.config))
        params, multipliers = restore_policy(folder, meta)
        opt_state = restore_item(folder, "optimizer", optimizer_shape)
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
    folder = _locate(Path(path))
    meta = read_meta(folder)
    params, multipliers = restore_policy(folder, meta)
    return LoadedPolicy(policy_from_meta(meta), params, multipliers, meta["tokenizer"], meta)


def _locate(path: Path) -> Path:
    """The folder of one checkpoint: that of a step, or of the last complete one."""
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
