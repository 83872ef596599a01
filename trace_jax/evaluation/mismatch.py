"""Is it safe to move this model to FP4? The divergence between trainer and rollout, before committing to a precision.

1. For each precision the engine answers held-out prompts and records every code of every layer.
2. For each method the trainer's forward (the training objective, compiled as in training) scores the same answers, with
   the record cut to what the method keeps.
3. The comparison is reported as a whole, per answer position, and per layer and site.

One rollout serves all methods of a precision. A guided forward replays the rollout's rounding; its small gap is partly by
construction, so the pass rate at each precision and the unguided methods stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import METHODS
from trace_jax.errors import UserError
from trace_jax.evaluation.audit import compare_sites
from trace_jax.evaluation.open_policy import OpenPolicy, open_policy, precision_config, require_precision
from trace_jax.evaluation.pass_rate import FIRST_SAMPLE, pass_interval
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.metrics.weighted import finalize
from trace_jax.rl.diagnostics import position_gap_stats
from trace_jax.rollout.engine import generate
from trace_jax.rollout.padding import pad_batch
from trace_jax.rollout.prompts import make_requests, score
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.setup import Setup, sync_weights
from trace_jax.train.update import UpdateSettings, measure

METHODS_OF = {
    "bf16": ("bf16",),
    "fp8": ("naive", "qat"),
    "nvfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
    "mxfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
}
"""Methods that make sense at a precision; only FP4 codes can be recorded."""

DEFAULT_PROMPTS = 64

SAFE, RISKY = 1.02, 1.05
"""Limits on `token_mult_prob_error`, mean(exp |gap|): at most SAFE is safe; NeMo RL's gate is 1.05, above it is unsafe."""


@dataclass(frozen=True)
class PrecisionRollout:
    """Answers of one precision with their full record, and how many are right."""

    precision: str
    setup: Setup
    trajectories: Trajectories
    pass_at_1: tuple[float, float, float]
    reward_mean: float


def roll_out(
    opened: OpenPolicy,
    precision: str,
    *,
    split: str,
    prompts: int,
    samples: int,
    seed: int,
) -> PrecisionRollout:
    """Generates answers at a precision, every sequence with its full record."""
    setup = opened.setup(precision_config(opened.config, precision, METHODS_OF[precision][0]))
    engine = setup.engine()
    sync_weights(engine, setup, opened.params, opened.multipliers, 0)
    rows = setup.task.rows(split)[:prompts]
    requests = make_requests(
        rows,
        setup.tokenizer,
        setup.sampling,
        group_size=samples,
        first_sample=FIRST_SAMPLE,
        seed=seed,
        audited=len(rows) * samples,
    )
    scored = score(generate(engine, requests), [row for row in rows for _ in range(samples)], setup.task, setup.tokenizer)
    engine.close()
    verified = ~np.isnan(scored.reward).reshape(len(rows), samples)
    rate = pass_interval(scored.correct.reshape(len(rows), samples), verified)
    reward = float(np.nanmean(scored.reward)) if verified.any() else float("nan")
    return PrecisionRollout(precision, setup, scored.trajectories, rate, reward)


def method_report(opened: OpenPolicy, rollout: PrecisionRollout, method: str) -> dict[str, Any]:
    """The divergence of one method from a rollout, as plain numbers.

    Returns:
      `metrics` (names of the training log), `positions` (mean |gap| by token index in the answer), `sites` (per site and
      layer, the figures of the audit; FP4 only), and `verdict`.
    """
    setup = opened.setup(precision_config(opened.config, rollout.precision, method))
    trajectories = with_record(rollout.trajectories, setup)
    settings = UpdateSettings(
        spec=setup.objective,
        optimizer=make_optimizer(setup.config.optimizer),
        micro_batch_tokens=setup.config.train.micro_batch_tokens,
        max_length=int(trajectories.lengths().max()),
        replay=setup.config.algorithm.routing_replay,
    )
    measured = measure(opened.params, opened.multipliers, trajectories, settings)
    metrics = {name: value for name, value in finalize(measured.stats).items() if name != "loss" and not name.startswith("policy/")}
    sites: dict[str, dict[str, dict[str, float]]] = {}
    if trajectories.audit is not None:
        audited = trajectories.select(trajectories.audit.sequences)
        for (site, layer), result in compare_sites(
            setup.objective, opened.params, opened.multipliers, audited, replay=settings.replay
        ).items():
            sites.setdefault(site, {})[str(layer)] = {name: float(metric.mean()) for name, metric in vars(result).items()}
    return {
        "metrics": metrics,
        "positions": _positions(trajectories, measured.logp),
        "sites": sites,
        "verdict": verdict(metrics["token_mult_prob_error"]),
    }


def with_record(trajectories: Trajectories, setup: Setup) -> Trajectories:
    """The same trajectories with their full record cut to what the setup's method keeps."""
    capture = setup.capture()
    full = trajectories.audit
    if full is None or capture.kind == "none" or not setup.objective.plan.guided_sites:
        return trajectories.replace(guidance=None)
    kept = {name: site for name, site in full.record.sites.items() if name in capture.sites}
    record = replace(full.record, sites=kept).to_compact(capture.kind, capture.layers)  # pyright: ignore[reportArgumentType]
    return trajectories.replace(guidance=record)


def verdict(token_mult_prob_error: float) -> str:
    """`safe`, `risky` or `unsafe`, from mean(exp |gap|)."""
    if not np.isfinite(token_mult_prob_error):
        return "unsafe"
    return "safe" if token_mult_prob_error <= SAFE else "risky" if token_mult_prob_error <= RISKY else "unsafe"


def measure_mismatch(
    path: Path,
    *,
    methods: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    engine: str = "jax",
    cache: Path | None = None,
    task: str | None = None,
    split: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """The whole report: per precision the pass rate, per method the divergence.

    Args:
      path: run directory or checkpoint.
      methods: trainer methods; None takes all that make sense at a precision.
      precisions: rollout precisions; None takes all. A guidance cache has one precision, the stored config's.
      engine: `jax`, the embedded engine.
      cache: a folder written by `trace-jax rollout --save-cache`, to compare with instead of generating.
      max_prompts: prompts of the split; None takes 64.

    Raises:
      UserError: an unknown precision, method or engine, or a cache that does not belong to the policy.
    """
    if engine != "jax":
        raise UserError(f"--engine {engine!r} is not available in this version; write jax")
    for name in precisions or ():
        require_precision(name)
    unknown = [name for name in methods or () if name not in METHODS]
    if unknown:
        raise UserError(f"--methods {unknown[0]!r} is unknown; write some of: {', '.join(METHODS)}")
    opened = open_policy(path, (), task)
    try:
        config = opened.config
        split, prompts = split or config.eval.split, max_prompts or DEFAULT_PROMPTS
        if cache is not None:
            rollouts = [cached_rollout(opened, cache)]
        else:
            wanted = precisions or tuple(METHODS_OF)
            rollouts = (roll_out(opened, name, split=split, prompts=prompts, samples=config.eval.samples, seed=seed) for name in wanted)
        report: dict[str, Any] = {"policy": str(path), "task": config.task.name, "split": split, "seed": seed, "precisions": {}}
        for rollout in rollouts:
            by_method = {}
            for method in METHODS_OF[rollout.precision]:
                if rollout.precision == "bf16" or methods is None or method in methods:
                    progress(f"{rollout.precision} {method}")
                    by_method[method] = method_report(opened, rollout, method)
            rate, low, high = rollout.pass_at_1
            report["precisions"][rollout.precision] = {
                "sequences": rollout.trajectories.num_sequences,
                "pass_at_1": rate,
                "pass_at_1_low": low,
                "pass_at_1_high": high,
                "reward_mean": rollout.reward_mean,
                "methods": by_method,
            }
        return report
    finally:
        opened.task.close()


def cached_rollout(opened: OpenPolicy, directory: Path) -> PrecisionRollout:
    """Trajectories of a saved guidance cache, as a rollout of the precision that the stored config names.

    Raises:
      UserError: the cache holds nothing, or the config mixes precisions.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; write one with trace-jax rollout --save-cache")
    rollout = opened.config.rollout
    formats = {rollout.weights, rollout.activations, rollout.kv_cache.k, rollout.kv_cache.v}
    if len(formats) != 1:
        raise UserError(f"the policy's config mixes the precisions {sorted(formats)}; a cache is compared at one precision")
    store = GuidanceCache.open(directory)
    ids = store.keys()
    if not len(ids):
        raise UserError(f"{directory}: the guidance cache holds no sample; write one with trace-jax rollout --save-cache")
    trajectories = store.get(ids)
    correct = trajectories.reward >= 1.0
    rate = pass_interval(correct[:, None], ~np.isnan(trajectories.reward)[:, None])
    precision = formats.pop()
    setup = opened.setup(precision_config(opened.config, precision, METHODS_OF[precision][0]))
    return PrecisionRollout(precision, setup, trajectories, rate, float(np.nanmean(trajectories.reward)))


def _positions(trajectories: Trajectories, logp: np.ndarray) -> list[float]:
    longest = int(trajectories.sampled_lengths().max())
    padded = pad_batch(trajectories, range(trajectories.num_sequences), int(trajectories.lengths().max()))
    train = pad_batch(trajectories.replace(logprobs=logp), range(trajectories.num_sequences), int(trajectories.lengths().max()))
    stats = position_gap_stats(
        jnp.asarray(train.logprobs), jnp.asarray(padded.logprobs), jnp.asarray(padded.sampled), num_positions=longest
    )
    metric = jax.device_get(stats["position/train_rollout_logprob_abs_diff"])
    return [float(value) for value in metric.mean()]
