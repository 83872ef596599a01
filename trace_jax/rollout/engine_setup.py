"""What an engine is made from: plain data, which can be sent to the process or the host where the engine runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import jax

from trace_jax.config import Config, resolve_layers
from trace_jax.config.checks import ENGINE_GROUP
from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.quantization.calibration import site_sizes
from trace_jax.quantization.channels import Channels, channel_counts
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.shared_engine import SharedEngine


@dataclass(frozen=True)
class EngineSetup:
    """The parts of a run that its engines need.

    Args:
      directory: the run's folder, where an engine leaves its log; None outside a run.
      channels: what the rollout's residual compensation takes; `compensated` sees that they are those the config asks for.
    """

    config: Config
    policy: Policy
    rollout_plan: QuantPlan
    directory: Path | None = None
    channels: Channels = field(default_factory=dict)

    def capture(self) -> CaptureSpec:
        """The guidance record that the rollout takes."""
        guidance = self.config.guidance
        layers = resolve_layers(guidance.layers, self.policy.config.num_layers)
        return CaptureSpec(guidance.record, tuple(guidance.sites), layers)

    def engine(self) -> Engine:
        """What generates for the run, without weights: one engine, those that Ray runs, or one for each process of the run.

        Raises:
          UserError: as `require_launch`, or Ray does not start the engines.
        """
        if not self.has_channels():
            raise RuntimeError("the rollout is to be compensated and no channels are chosen: call `compensated` first")
        self.require_launch()
        if jax.process_count() == 1:
            return self._launched()
        folder = None if self.directory is None else self.directory / f"process_{jax.process_index()}"
        return SharedEngine(replace(self, directory=folder)._launched())

    def require_launch(self) -> None:
        """Refuses engines that cannot be started here, before anything is.

        Raises:
          UserError: the run is asynchronous and has several processes, Ray is not installed, or its engines would be on the trainer's GPUs.
        """
        config = self.config
        if config.asynchronous and jax.process_count() > 1:
            raise UserError(
                f"sync.max_staleness is {config.sync.max_staleness}, which makes training asynchronous, but several processes train in "
                f"step only; write sync.max_staleness: {config.least_staleness}, or use one process"
            )
        if config.rollout.launcher == "process":
            return
        if find_spec("ray") is None:
            raise UserError("rollout.launcher ray needs Ray; run: pip install 'trace-jax[ray]', or write launcher: process")
        if config.rollout.ray.address is None and jax.default_backend() == "gpu":
            raise UserError(
                "rollout.ray.address is null, and Ray would start the engines on this machine's GPUs, which the trainer holds; start a "
                "cluster with other ones (CUDA_VISIBLE_DEVICES=4,5,6,7 ray start --head) and write rollout.ray.address: auto"
            )

    def _launched(self) -> Engine:
        """The engines of this process: one, or those that Ray runs for it."""
        if self.config.rollout.launcher == "process":
            return self.single_engine()
        from trace_jax.rollout.ray_engines.pool import start_engines

        return start_engines(EngineSetup(self.config, self.policy, self.rollout_plan, self.directory, self.channels))

    def single_engine(self) -> Engine:
        """One engine of this process: the embedded one, or what the factory of an installed package makes of this setup."""
        rollout = self.config.rollout
        if rollout.engine != "jax":
            (point,) = entry_points(group=ENGINE_GROUP, name=rollout.engine)
            return point.load()(self)
        policy = replace(self.policy, partial_sums=rollout.partial_sums)
        return EmbeddedEngine(policy, self.rollout_plan, self.capture(), rollout.max_batch, self.channels)

    def channel_counts(self) -> dict[str, int]:
        """How many channels of each site and layer the rollout compensates."""
        return channel_counts(site_sizes(self.policy), self.rollout_plan, self.config.rollout.residual_compensation.fraction)

    def has_channels(self) -> bool:
        """Whether `channels` are as many as the config asks for."""
        return {site: ids.shape[1] for site, ids in self.channels.items()} == self.channel_counts()
