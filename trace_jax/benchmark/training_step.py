"""The time and memory of a whole optimizer step, method by method.

The step is the project's own (`train/update.py`): packing, the forward and backward pass of the objective, one Adam step. Data is
synthetic: random tokens and routes, and for `trace` a random record. All methods train a slice of Qwen3-30B-A3B, the same but for
the number of layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.benchmark.rows import new_row
from pallas_kernels.benchmark.targets import Target
from trace_jax.benchmark.synthetic import synthetic_multipliers, synthetic_trajectories
from trace_jax.config import resolve_layers
from trace_jax.config.presets import preset
from trace_jax.config.training_sections import OptimizerConfig
from trace_jax.models.policy import Policy
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.registry import init_params
from trace_jax.quantization.plan import rollout_plan, trainer_plan
from trace_jax.rl.advantages import group_advantages
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.state import initial_state
from trace_jax.train.update import UpdateSettings, measure, update_policy

OP = "training_step"
METHODS = ("bf16", "qat", "trace")
"""The first is the peer of the others. The allocator's peak never falls, so they stand in the order of what they need."""

_TARGETS = {"trace": Target("ratio", 1.10, "bf16")}
_STEPS, _SMALL_STEPS = 5, 2


class Workload(NamedTuple):
    """What is trained.

    Args:
      name: of the model.
      config: its shape.
      sequences: sequences of a step.
      length: tokens of each.
    """

    name: str
    config: Qwen3MoeConfig
    sequences: int
    length: int

    @property
    def text(self) -> str:
        """For the column `shape`."""
        layers = self.config.num_layers
        return f"{self.name}, {layers} layer{'s' if layers > 1 else ''}, {self.sequences} sequences of {self.length}"


def run(layers: int = 2, small: bool = False, note: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Rows in the columns of `pallas_kernels.benchmark.run`.

    Args:
      layers: decoder layers of the slice.
      small: a toy model, for CPU.
      note: is told what is being timed.

    Returns:
      A row `training_step/METHOD` with the median time of a step for each of METHODS, and where the device counts its memory a
      row `training_step/METHOD/peak_memory`, whose `bytes` is the most that was in use; ratio is to bf16 in both.
    """
    workload = _toy(layers) if small else _slice(layers)
    judged = jax.default_backend() == "gpu" and not small
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    rows = []
    for method in METHODS:
        note(f"compiling and timing {OP} with method {method}")
        times[method] = _median_time_us(workload, method, _SMALL_STEPS if small else _STEPS)
        peer = None if method == METHODS[0] else METHODS[0]
        ratio = None if peer is None else round(times[method] / times[peer], 4)
        target = _TARGETS.get(method) if judged else None
        common = {"implementation": "trace-jax", "shape": workload.text, "dtype": "bfloat16", "peer": peer}
        rows.append(
            new_row(
                **common,
                op=f"{OP}/{method}",
                time_us=round(times[method], 2),
                peer_time_us=None if peer is None else round(times[peer], 2),
                ratio=ratio,
                target=None if target is None else target.text,
                met=None if target is None or ratio is None else ratio <= target.bound,
            )
        )
        stats = jax.devices()[0].memory_stats()
        if stats:
            peaks[method] = stats["peak_bytes_in_use"]
            share = None if peer is None else round(peaks[method] / peaks[peer], 4)
            rows.append(new_row(**common, op=f"{OP}/{method}/peak_memory", bytes=peaks[method], ratio=share))
    return rows


def _slice(layers: int) -> Workload:
    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        experts_per_token=8,
        expert_hidden_size=768,
    )
    return Workload("qwen3-30b-a3b", config, 8, 2048)


def _toy(layers: int) -> Workload:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_experts=4,
        experts_per_token=2,
        expert_hidden_size=32,
    )
    return Workload("toy", config, 4, 16)


def _median_time_us(workload: Workload, method: str, steps: int) -> float:
    """Median time of an optimizer step after one that compiles.

    Raises:
      RuntimeError: a gradient was not finite, so that a step was none.
    """
    keys, config = preset(method), workload.config
    quant, record = keys["train_quant"], keys["guidance"]["record"]
    layers = resolve_layers(keys["guidance"].get("layers", "all"), config.num_layers)
    plan = trainer_plan(
        rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4"), quant["weights"], quant["activations"], quant["down_input"], quant["kv_cache"]
    )
    policy = Policy("qwen3_moe", config, remat=True)
    settings = UpdateSettings(ObjectiveSpec(policy, plan), workload.sequences * workload.length, workload.length)
    trajectories = synthetic_trajectories(config, workload.sequences, workload.length, record, layers)
    advantages = group_advantages(trajectories.reward, trajectories.group)
    optimizer = make_optimizer(OptimizerConfig())
    params = init_params(policy.family, config, jax.random.key(0))
    state = initial_state(params, optimizer, synthetic_multipliers(config.num_layers))
    del params  # the first step's would stay beside the newest

    times = []
    for _ in range(1 + steps):
        start = time.perf_counter()
        measured = measure(state.params, state.multipliers, trajectories, settings, advantages=advantages)
        result = update_policy(state, measured, optimizer)
        state = jax.block_until_ready(result.state)
        times.append((time.perf_counter() - start) * 1e6)
        if not np.isfinite(result.grad_norm):
            raise RuntimeError(f"{OP}/{method}: the gradient is not finite; its time would be that of a refused step")
    return statistics.median(times[1:])
