"""Figures of a step's answers: rewards, lengths, the record, and how old they are."""

from __future__ import annotations

import numpy as np

from trace_jax.rl.advantages import frac_reward_zero_std
from trace_jax.rollout.prompts import Scored
from trace_jax.rollout.trajectories import FinishReason, Trajectories


def rollout_metrics(scored: Scored, trajectories: Trajectories) -> dict[str, float]:
    """Rewards, lengths and the guidance record of all answers of a step."""
    verified = ~np.isnan(scored.reward)
    lengths = trajectories.sampled_lengths()
    metrics = {
        "reward/mean": float(scored.reward[verified].mean()) if verified.any() else float("nan"),
        "reward/pass_rate": float(scored.correct[verified].mean()) if verified.any() else float("nan"),
        "reward/verifier_errors": float(scored.verifier_errors),
        "frac_reward_zero_std": frac_reward_zero_std(scored.reward, trajectories.group),
        "response/length_mean": float(lengths.mean()),
        "response/truncated_fraction": float(np.mean(trajectories.finish_reason == FinishReason.LENGTH)),
    }
    record = trajectories.guidance
    if record is not None:
        # The last token of a sequence is never an input, so it has no record and is not missing one.
        fed = np.ones(trajectories.num_tokens, bool)
        fed[trajectories.offsets[1:] - 1] = False
        metrics["guidance/missing_fraction"] = float(np.mean(~record.valid[fed]))
        recomputed = record.recomputed
        metrics["guidance/recomputed_fraction"] = 0.0 if recomputed is None else float(np.mean(recomputed[fed]))
        sizes = record.bytes_per_token()
        metrics |= {f"guidance/bytes_per_token/{name}": size for name, size in sizes.items() if name != "total"}
        metrics["guidance/bytes_per_token"] = sizes["total"]
        saturated = [np.mean(site.scales[record.valid] == 0x7E) for site in record.sites.values() if site.format == "nvfp4"]
        metrics["guidance/saturation_fraction"] = float(np.mean(saturated)) if saturated else 0.0
    return metrics


def staleness_metrics(trajectories: Trajectories, version: int) -> dict[str, float]:
    """How old the answers of an asynchronous step are before its first update, and the records that guide its rounding.

    Args:
      trajectories: that the step trains on.
      version: of the trainer.

    Returns:
      `sync/staleness_mean` over sampled tokens, the share of sequences that more than one version generated, and for every gap between
      the trainer's version and a record's the share of the records.
    """
    versions, starts = trajectories.weight_version, trajectories.offsets[:-1]
    mixed = np.maximum.reduceat(versions, starts) > np.minimum.reduceat(versions, starts)
    metrics = {
        "sync/staleness_mean": float(version - versions[trajectories.sampled].mean(dtype=np.float64)),
        "sync/mixed_fraction": float(mixed.mean()),
    }
    record = trajectories.guidance
    if record is not None and record.valid.any():
        gaps, counts = np.unique(version - record.version[record.valid], return_counts=True)
        metrics |= {f"guidance/version_gap/{gap}": float(count / counts.sum()) for gap, count in zip(gaps, counts, strict=True)}
    return metrics
