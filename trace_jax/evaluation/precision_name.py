"""The precision of a rollout in words."""

from __future__ import annotations

from trace_jax.config.rollout_sections import RolloutSection


def rollout_precision(rollout: RolloutSection) -> str:
    """`nvfp4` where everything is in one format, and otherwise each part with its own."""
    formats = {"weights": rollout.weights, "activations": rollout.activations, "k": rollout.kv_cache.k, "v": rollout.kv_cache.v}
    if len(set(formats.values())) == 1:
        return rollout.weights
    return ", ".join(f"{part} {name}" for part, name in formats.items())
