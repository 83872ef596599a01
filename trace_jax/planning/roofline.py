"""The least time of a decode step: every byte that it must read, at the full bandwidth, and every product, at the peak.

Weights are read once a step: everything outside of the experts, and the experts that some token of the batch uses, on average
`E (1 - (1 - k/E)^B)` of them. The cache is read once for every sequence. The larger of the two times counts. Kernel launches, sampling,
communication and imperfect kernels are left out, so real steps take longer, short ones by far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trace_jax.models.policy import Policy
from trace_jax.planning.footprint import bytes_per_value, cache_bytes_per_token, parameters_of, weight_bytes
from trace_jax.planning.gpus import Gpu

RESERVE = 0.1
"""Share of the memory that an engine leaves for activations and workspace."""

LARGEST_BATCH = 4096


@dataclass(frozen=True)
class Rollout:
    """Formats of an engine: of the routed experts' weights, of the operands of their products, and of the KV cache."""

    weights: str
    products: str
    cache: str


def rollouts(gpu: Gpu, fmt: str) -> dict[str, Rollout]:
    """BF16, and FP4 as the GPU executes it: with FP4 products where it has them, else with weights decoded to BF16."""
    return {"bf16": Rollout("bf16", "bf16", "bf16"), fmt: Rollout(fmt, "fp4" if "fp4" in gpu.flops else "bf16", fmt)}


def step_seconds(policy: Policy, gpu: Gpu, rollout: Rollout, batch: int, context: int, gpus: int = 1) -> float:
    """Least seconds of one decode step.

    Args:
      batch: sequences, each with `context` tokens in the cache.
      gpus: that share the work and the memory evenly.
    """
    config, parameters = policy.config, parameters_of(policy)
    used = 1 - (1 - config.experts_per_token / config.num_experts) ** batch if config.num_experts else 0.0
    weights = used * parameters.experts * bytes_per_value(rollout.weights) + 2.0 * (parameters.rest - parameters.table)
    cache = batch * context * cache_bytes_per_token(policy, rollout.cache)
    active = parameters.experts * config.experts_per_token / config.num_experts if config.num_experts else 0.0
    seconds = 2 * batch * (active / gpu.peak(rollout.products) + (parameters.active - active) / gpu.peak("bf16"))
    return max((weights + cache) / gpu.bandwidth, seconds) / gpus


def batch_that_fits(policy: Policy, gpu: Gpu, rollout: Rollout, context: int, gpus: int = 1) -> int:
    """Sequences whose cache fits beside the weights, 0 if none does, at most `LARGEST_BATCH`."""
    room = gpus * gpu.memory * (1 - RESERVE) - weight_bytes(parameters_of(policy), rollout.weights)
    return max(0, min(LARGEST_BATCH, int(room / (context * cache_bytes_per_token(policy, rollout.cache)))))


def speedups(
    policy: Policy, gpu: Gpu, fmt: str, batches: Sequence[int], contexts: Sequence[int], gpus: int = 1
) -> dict[int, dict[int | str, float | None]]:
    """Decode throughput of FP4 over BF16 by context: at equal batches, and with the largest batch of each (`full`).

    None where a batch (or a single sequence) does not fit; at equal batches that of FP4 decides, though BF16 may not fit.
    """
    bf16, fp4 = rollouts(gpu, fmt).values()
    found: dict[int, dict[int | str, float | None]] = {}
    for context in contexts:
        most = {rollout: batch_that_fits(policy, gpu, rollout, context, gpus) for rollout in (bf16, fp4)}
        row: dict[int | str, float | None] = {}
        for batch in batches:
            times = [step_seconds(policy, gpu, rollout, batch, context, gpus) for rollout in (bf16, fp4)]
            row[batch] = times[0] / times[1] if batch <= most[fp4] else None
        rates = [
            most[rollout] and most[rollout] / step_seconds(policy, gpu, rollout, most[rollout], context, gpus) for rollout in (bf16, fp4)
        ]
        row["full"] = rates[1] / rates[0] if all(rates) else None
        found[context] = row
    return found
