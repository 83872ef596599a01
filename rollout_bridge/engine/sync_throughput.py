"""How long a weight update takes for every GB of it, from the trainer's masters to vLLM's own tensors:

    python -m rollout_bridge.engine.sync_throughput --python PYTHON_WITH_VLLM

The weights are those of layers of Qwen3-30B-A3B (128 experts) in NVFP4, with a small vocabulary; three layers are 1.1 GB. The values are
random. The trainer's side is `layer_updates` and `send`, the other side a vLLM in a process of its own, fed through a ring as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_bridge.engine.blank_checkpoint import write_blank_checkpoint
from rollout_bridge.engine.factory import LARGEST_SLOT
from rollout_bridge.engine.process import WORKER_ENVIRONMENT, vllm_command
from rollout_bridge.engine.transfer import SLOTS
from rollout_bridge.engine.weights import send
from rollout_bridge.engine.worker_folder import write_worker_folder
from rollout_bridge.export.settings import ExportSettings
from rollout_bridge.vllm_plugin.weights import timed_updates
from rollout_bridge.vllm_plugin.weights.seconds import seconds
from rollout_bridge.wire import Ring, RingWriter
from trace_jax.models.policy import Policy
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.registry import Params, param_shapes
from trace_jax.quantization.plan import SITES, rollout_plan
from trace_jax.rollout.weight_sync import layer_updates

LAYER = Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=2048,
    num_layers=3,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_hidden_size=768,
    max_position=128,
)
"""Three layers of Qwen3-30B-A3B."""

PLAN = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
_TIMEOUT_S = 600.0


def measure(python: str, config: Qwen3MoeConfig = LAYER, updates: int = 3) -> dict[str, Any]:
    """Sends the same model several times; the first one, in which programs are compiled and pages touched, is not counted.

    Args:
      python: the interpreter that has vLLM.
      config: the model.
      updates: how many count.

    Returns:
      `gb` of an update (1e9 bytes); medians of seconds for every GB, and of processor seconds under the same names with `_cpu`:
      `quantize`, the masters rounded on the trainer's device; `send`, its checksum and the copy into the ring; and on the other side
      `receive`, out of the ring into the worker's memory; `check`, its checksum and the look at the values; `load`, vLLM's loader. Sending
      and receiving run at the same time, so `total` is quantize, receive, check and load; `total_cpu` has all of them.

    Raises:
      RuntimeError: the worker ended, or it has other weights than were sent; its log was printed.
    """
    policy = Policy("qwen3_moe", config)
    params = random_masters(policy)
    multipliers = {site: np.ones(config.num_layers, np.float32) for site in SITES}
    with _worker(python, policy) as (worker, writer):
        measured = [_update(worker, writer, policy, params, multipliers, version) for version in range(updates + 1)][1:]
    return {name: round(statistics.median(one[name] for one in measured), 6) for name in measured[0]}


def random_masters(policy: Policy) -> Params:
    """Float32 parameters that repeat a million normal values: rounding takes as long for them as for others."""
    values = 0.02 * np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    return jax.tree.map(lambda leaf: jnp.asarray(np.resize(values, leaf.shape)), param_shapes(policy.family, policy.config))


def _update(
    worker: subprocess.Popen[str], writer: RingWriter, policy: Policy, params: Params, multipliers: dict[str, Any], version: int
) -> dict[str, float]:
    start = seconds()
    updates = list(layer_updates(policy, PLAN, params, multipliers))
    jax.block_until_ready([dict(one.tensors) for one in updates])
    quantized = seconds()
    assert worker.stdin is not None
    worker.stdin.write(f"{version}\n")
    worker.stdin.flush()
    expected = send(updates, writer, version, _TIMEOUT_S)
    sent = seconds()
    found = _answer(worker)
    if found["ack"] != asdict(expected):
        raise RuntimeError(f"sent {expected}, the worker has {found['ack']}")
    stages = {
        "quantize": quantized - start,
        "send": sent - quantized,
        "check": np.array(found["check_s"]),
        "load": np.array(found["load_s"]),
    }
    stages["receive"] = np.array(found["receive_s"]) - stages["check"]
    total = sum(stages.values(), np.zeros(2))
    total[0] -= stages["send"][0]
    values = {name: stage / found["gb"] for name, stage in {**stages, "total": total}.items()}
    return (
        {"gb": found["gb"]}
        | {name: value[0] for name, value in values.items()}
        | {f"{name}_cpu": value[1] for name, value in values.items()}
    )


@contextmanager
def _worker(python: str, policy: Policy) -> Iterator[tuple[subprocess.Popen[str], RingWriter]]:
    with tempfile.TemporaryDirectory(prefix="trace-jax-sync-") as name, Ring.create(slots=SLOTS, slot_bytes=LARGEST_SLOT) as ring:
        folder = Path(name)
        model = write_blank_checkpoint(folder / "model", policy, ExportSettings("nvfp4"))
        environment = os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": str(write_worker_folder(folder / "worker"))}
        command = [vllm_command(python)[0], "-m", timed_updates.__name__, str(model), str(ring.path)]
        with (
            RingWriter(ring.path) as writer,
            open(folder / "log", "w+") as log,
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as worker,
        ):
            try:
                _answer(worker)
                yield worker, writer
            except BaseException:
                worker.kill()
                sys.stderr.write((folder / "log").read_text()[-4000:])
                raise


def _answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(timed_updates.ANSWER):
            return json.loads(line.removeprefix(timed_updates.ANSWER))
    raise RuntimeError("the worker has ended")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a weight update for every GB.")
    parser.add_argument("--python", required=True, help="interpreter that has vLLM")
    parser.add_argument("--layers", type=int, default=LAYER.num_layers)
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    config = Qwen3MoeConfig(**{**asdict(LAYER), "num_layers": arguments.layers})
    print(json.dumps(measure(arguments.python, config, arguments.updates)))


if __name__ == "__main__":
    _main()
