"""What the process that runs an `LLM` calls. Imports no vllm by itself."""

from pathlib import Path
from typing import Any

from rollout_bridge.vllm_plugin.weights.errors import WeightsRefused
from rollout_bridge.vllm_plugin.workers import agreed

BACKEND = "trace_jax"
"""Name of the weight-transfer engine: `LLM(weight_transfer_config={"backend": BACKEND})`."""


def update_weights(llm: Any, ring_path: Path | str, version: int, timeout_s: float = 60.0) -> dict[str, Any]:
    """Takes the update that the trainer sends through a ring. Requests that run start over from their tokens so far.

    Args:
      llm: an `LLM` made with `BACKEND`, in this process.
      version: the update's; records of others are dropped.
      timeout_s: how long the trainer may take to its next record.

    Returns:
      `count`, `checksum` and `version` of the weights now in use.

    Raises:
      WeightsRefused: something is wrong with the update; the weights in use stay, and so do caches and running requests.
      WeightsDamaged: loading failed halfway; the engine must be started again.
      WireError: the ring cannot be opened.
    """
    llm.init_weight_transfer_engine({"init_info": {"ring_path": str(ring_path)}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "timeout_s": timeout_s}})
    llm.finish_weight_update()
    if refused := llm.collective_rpc(_attribute, args=("refused",))[0]:
        raise WeightsRefused(refused)
    llm.reset_prefix_cache(reset_running_requests=True)
    return weights_checksum(llm)


def weights_checksum(llm: Any) -> dict[str, Any] | None:
    """`count`, `checksum` and `version` of the weights in use, as they arrived; None if they are those the engine was started with."""
    return agreed(llm.collective_rpc(_attribute, args=("in_use",)), "the weights in use")


def update_timing(llm: Any) -> dict[str, Any] | None:
    """Of the last update, None before the first: `gb` (1e9 bytes of tensors), and pairs of seconds and processor seconds.

    `receive_s` until all of it lies here and is checked, of which `check_s` for checksum and values, and `load_s`.
    """
    return llm.collective_rpc(_attribute, args=("timing",))[0]


def _attribute(worker: Any, name: str) -> Any:
    return getattr(worker.weight_transfer_engine, name)
