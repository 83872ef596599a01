"""Whether a policy can be divided between the tensor-parallel workers of one engine."""

from __future__ import annotations

from pallas_kernels import block_format
from trace_jax.errors import UserError
from trace_jax.quantization.plan import BLOCK_FORMATS
from trace_jax.rollout.engine_setup import EngineSetup


def require_divisible(setup: EngineSetup) -> None:
    """Refuses what vLLM cannot divide, and what would be rounded otherwise when it is divided.

    Raises:
      UserError: heads or columns of the experts that no whole number goes to each worker, blocks that would lie in two workers, or
        settings that go with one worker only.
    """
    section, config, plan = setup.config.rollout.vllm, setup.policy.config, setup.rollout_plan
    workers, key = section.tensor_parallel, "rollout.vllm.tensor_parallel"
    if workers == 1:
        return
    if section.mode == "in_process":
        raise UserError(f"{key} is {workers} and rollout.vllm.mode in_process; write mode: process, which starts the workers")
    if setup.config.rollout.residual_compensation.fraction > 0:
        raise UserError(f"{key} is {workers} and channels are compensated, whose blocks would lie in two workers; write {key}: 1")
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % workers or (kv_heads % workers and workers % kv_heads):
        raise UserError(f"{key} is {workers} and the model has {heads} heads and {kv_heads} KV heads; write a number that divides both")
    block = block_format(plan.weights).block if plan.weights in BLOCK_FORMATS else 1
    if config.moe_layer_ids and config.expert_hidden_size % (workers * block):
        whole = f" in blocks of {block}, one of which would lie in two workers" if block > 1 else ""
        raise UserError(f"{key} is {workers} and experts have {config.expert_hidden_size} hidden values{whole}; write a number that fits")
