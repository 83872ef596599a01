"""Opens a trained or imported policy for measurement, at any rollout precision and under any method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trace_jax.config import Config, from_mapping
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.rollout.weight_sync import static_sites
from trace_jax.tasks import Task
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.read_checkpoint import restore_channels
from trace_jax.train.setup import Setup, build_setup, calibrated, compensated, load_config_task, require_finite


@dataclass
class OpenPolicy:
    """A policy with its task, ready for engines of any precision.

    Args:
      config: the run's config with overrides applied.
      policy, params: static description and float32 masters.
      multipliers: static multipliers; calibrated on first need when the checkpoint has none.
      task: loaded once.
      channels: those that a rollout compensates, by the format of its activations and their share: the checkpoint's, and what was
        chosen on first need.
    """

    config: Config
    policy: Policy
    params: Params
    multipliers: Multipliers
    task: Task
    channels: dict[tuple[str, float], Channels] = field(default_factory=dict)

    def setup(self, config: Config) -> Setup:
        """The fixed parts under a changed config; calibrates if the rollout needs multipliers or channels that are not there."""
        setup = build_setup(config, (self.policy.family, self.policy.config), self.task)
        if not set(static_sites(setup.rollout_plan)) <= set(self.multipliers):
            self.multipliers = calibrated(setup, self.params)
        key = compensation(config)
        setup = compensated(replace(setup, channels=self.channels.get(key, {})), self.params, self.multipliers)
        self.channels[key] = setup.channels
        return setup


def compensation(config: Config) -> tuple[str, float]:
    """What a choice of channels belongs to: the format of the activations and the share that is compensated."""
    return config.rollout.activations, config.rollout.residual_compensation.fraction


def open_policy(path: Path, overrides: Sequence[str] = (), task: str | None = None) -> OpenPolicy:
    """Reads a run directory or checkpoint.

    Args:
      path: run directory, checkpoint directory, or one step of it.
      overrides: `key=value` settings on top of the stored config.
      task: another task than the run's; its own parameters then come from overrides.

    Raises:
      UserError: the checkpoint or a setting is wrong, or the weights are not finite.
    """
    loaded = load_policy(path)
    require_finite(loaded.params, path)
    values = loaded.meta["config"] | {"tokenizer": loaded.tokenizer}
    if task is not None and task != values["task"]["name"]:
        values = values | {"task": {"name": task}}
    config = from_mapping(values, overrides, source=f"the config stored in {path}")
    channels = {compensation(from_mapping(loaded.meta["config"])): restore_channels(loaded.meta)}
    return OpenPolicy(config, loaded.policy, loaded.params, loaded.multipliers, load_config_task(config), channels)
