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
      channels: those that the rollout compensates; chosen on first need when the checkpoint has none, or another number.
    """

    config: Config
    policy: Policy
    params: Params
    multipliers: Multipliers
    task: Task
    channels: Channels = field(default_factory=dict)

    def setup(self, config: Config) -> Setup:
        """The fixed parts under a changed config; calibrates if the rollout needs multipliers or channels that are not there."""
        setup = replace(build_setup(config, (self.policy.family, self.policy.config), self.task), channels=self.channels)
        if not set(static_sites(setup.rollout_plan)) <= set(self.multipliers):
            self.multipliers = calibrated(setup, self.params)
        setup = compensated(setup, self.params, self.multipliers)
        self.channels = setup.channels or self.channels
        return setup


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
    channels = restore_channels(loaded.meta)
    return OpenPolicy(config, loaded.policy, loaded.params, loaded.multipliers, load_config_task(config), channels)
