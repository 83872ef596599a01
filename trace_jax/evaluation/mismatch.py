"""Is it safe to move this model to FP4? The divergence between trainer and rollout, before committing to a precision.

1. For each precision the engine answers held-out prompts and records every code of every layer.
2. For each method the trainer's forward (the training objective, compiled as in training) scores the same answers, with
   the record cut to what the method keeps.
3. The comparison is reported as a whole, per answer position, and per layer and site.

One rollout serves all methods of a precision. A guided forward replays the rollout's rounding; its small gap is partly by
construction, so the pass rate at each precision and the unguided methods stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import METHODS, Config, from_mapping
from trace_jax.config.keys import overlay
from trace_jax.evaluation.audit import compare_sites
from trace_jax.evaluation.pass_rate import FIRST_SAMPLE, pass_interval
from trace_jax.metrics.weighted import finalize
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.rl.diagnostics import position_gap_stats
from trace_jax.rollout.engine import generate
from trace_jax.rollout.padding import pad_batch
from trace_jax.rollout.prompts import make_requests, score
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.setup import Setup, sync_weights
from trace_jax.train.update import UpdateSettings, measure

PRECISIONS: dict[str, dict[str, Any]] = {
    name: {"rollout": {"weights": name, "activations": name, "kv_cache": {"k": name, "v": name}}}
    for name in ("bf16", "fp8", "nvfp4", "mxfp4")
}
"""Precision -> the config keys that set every quantized tensor of the rollout to it."""

METHODS_OF = {
    "bf16": ("bf16",),
    "fp8": ("naive", "qat"),
    "nvfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
    "mxfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
}
"""Methods that make sense at a precision; only FP4 codes can be recorded."""

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


def precision_config(config: Config, precision: str, method: str) -> Config:
    """The config with the rollout at a precision and the trainer as a method says."""
    values = config.model_dump(mode="json")
    values = overlay(values, overlay(METHODS[method], PRECISIONS[precision]))
    if method == "bf16":
        values = overlay(values, METHODS["bf16"])
    return from_mapping(values | {"method": method})


def roll_out(
    config: Config,
    build: Callable[[Config], Setup],
    params: Params,
    multipliers: Multipliers,
    precision: str,
    *,
    split: str,
    prompts: int,
    samples: int,
) -> PrecisionRollout:
    """Generates answers at a precision, every sequence with its full record."""
    setup = build(precision_config(config, precision, METHODS_OF[precision][0]))
    engine = setup.engine()
    sync_weights(engine, setup, params, multipliers, 0)
    rows = setup.task.rows(split)[:prompts]
    requests = make_requests(
        rows,
        setup.tokenizer,
        setup.sampling,
        group_size=samples,
        first_sample=FIRST_SAMPLE,
        seed=config.seed,
        audited=len(rows) * samples,
    )
    scored = score(generate(engine, requests), [row for row in rows for _ in range(samples)], setup.task, setup.tokenizer)
    engine.close()
    verified = ~np.isnan(scored.reward).reshape(len(rows), samples)
    rate = pass_interval(scored.correct.reshape(len(rows), samples), verified)
    reward = float(np.nanmean(scored.reward)) if verified.any() else float("nan")
    return PrecisionRollout(precision, setup, scored.trajectories, rate, reward)


def method_report(
    config: Config, build: Callable[[Config], Setup], params: Params, multipliers: Multipliers, rollout: PrecisionRollout, method: str
) -> dict[str, Any]:
    """The divergence of one method from a rollout, as plain numbers.

    Returns:
      `metrics` (names of the training log), `positions` (mean |gap| by token index in the answer), `sites` (per site and
      layer, the figures of the audit; FP4 only), and `verdict`.
    """
    setup = build(precision_config(config, rollout.precision, method))
    trajectories = with_record(rollout.trajectories, setup)
    settings = UpdateSettings(
        spec=setup.objective,
        optimizer=make_optimizer(setup.config.optimizer),
        micro_batch_tokens=setup.config.train.micro_batch_tokens,
        max_length=int(trajectories.lengths().max()),
        replay=setup.config.algorithm.routing_replay,
    )
    measured = measure(params, multipliers, trajectories, settings)
    metrics = {name: value for name, value in finalize(measured.stats).items() if name != "loss" and not name.startswith("policy/")}
    sites: dict[str, dict[str, dict[str, float]]] = {}
    if trajectories.audit is not None:
        audited = trajectories.select(trajectories.audit.sequences)
        for (site, layer), result in compare_sites(setup.objective, params, multipliers, audited, replay=settings.replay).items():
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


def mismatch(
    config: Config,
    build: Callable[[Config], Setup],
    params: Params,
    multipliers: Multipliers,
    *,
    precisions: Sequence[str],
    methods: Sequence[str] | None,
    split: str,
    prompts: int,
    samples: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Mapping[str, Any]:
    """The whole report: per precision the pass rate, per method the divergence."""
    report: dict[str, Any] = {"split": split, "prompts": prompts, "samples": samples, "precisions": {}}
    done = 0
    for precision in precisions:
        rollout = roll_out(config, build, params, multipliers, precision, split=split, prompts=prompts, samples=samples)
        wanted = [name for name in METHODS_OF[precision] if methods is None or name in methods or name == "bf16"]
        by_method = {}
        for method in wanted:
            by_method[method] = method_report(config, build, params, multipliers, rollout, method)
            progress(done := done + 1)
        rate, low, high = rollout.pass_at_1
        report["precisions"][precision] = {
            "pass_at_1": rate,
            "pass_at_1_low": low,
            "pass_at_1_high": high,
            "reward_mean": rollout.reward_mean,
            "methods": by_method,
        }
    return report


def _positions(trajectories: Trajectories, logp: np.ndarray) -> list[float]:
    longest = int(trajectories.sampled_lengths().max())
    padded = pad_batch(trajectories, range(trajectories.num_sequences), int(trajectories.lengths().max()))
    train = pad_batch(trajectories.replace(logprobs=logp), range(trajectories.num_sequences), int(trajectories.lengths().max()))
    stats = position_gap_stats(
        jnp.asarray(train.logprobs), jnp.asarray(padded.logprobs), jnp.asarray(padded.sampled), num_positions=longest
    )
    metric = jax.device_get(stats["position/train_rollout_logprob_abs_diff"])
    return [float(value) for value in metric.mean()]
