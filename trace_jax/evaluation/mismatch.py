"""Is it safe to move this model to FP4? The divergence between trainer and rollout, before committing to a precision.

1. For each precision the engine answers held-out prompts and records every code of every layer.
2. For each method the trainer's forward (the training objective, compiled as in training) scores the same answers, with
   the record cut to what the method keeps.
3. The comparison is reported as a whole, per answer position, and per layer and site.
4. The pass rate against BF16 and the gap of each method give one answer per precision.

One rollout serves all methods of a precision. A guided forward replays the rollout's rounding; its small gap is partly by
construction, so the pass rate decides first, and the unguided methods stand beside the guided ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from trace_jax.config import METHODS, Config
from trace_jax.errors import UserError
from trace_jax.evaluation.audit import compare_sites
from trace_jax.evaluation.cache_origin import read_origin
from trace_jax.evaluation.mismatch_verdict import RISKY, SMALL, gap_size, judge
from trace_jax.evaluation.open_policy import OpenPolicy, open_policy
from trace_jax.evaluation.precision_rollout import NotExecuted, PrecisionRollout, cached_rollout, roll_out
from trace_jax.evaluation.precisions import (
    METHODS_OF,
    methods_of,
    precision_config,
    precision_overrides,
    require_measurable,
    require_precision,
)
from trace_jax.metrics.weighted import finalize
from trace_jax.rl.diagnostics import position_gap_stats
from trace_jax.rollout.padding import pad_batch
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.terminal import Announce, unannounced
from trace_jax.train.setup import Setup
from trace_jax.train.update import measure

DEFAULT_PROMPTS = 64

ONE_SUM = "rollout.partial_sums=1"
"""Only the embedded engine imitates several devices; another one sums as it does."""


def method_report(opened: OpenPolicy, rollout: PrecisionRollout, config: Config) -> dict[str, Any]:
    """The divergence of one method from a rollout, as plain numbers.

    Args:
      config: of the method, at the rollout's precision.

    Returns:
      `metrics` (names of the training log), `positions` (mean |gap| by token index in the answer), `sites` (per site and
      layer, the figures of the audit; FP4 only), and `gap`, the size of the gap: small, risky or large.
    """
    setup = opened.setup(config)
    trajectories = with_record(rollout.trajectories, setup)
    settings = setup.updates(rollout.max_length)
    measured = measure(opened.params, opened.multipliers, trajectories, settings)
    metrics = {name: value for name, value in finalize(measured.stats).items() if name != "loss" and not name.startswith("policy/")}
    sites: dict[str, dict[str, dict[str, float]]] = {}
    if rollout.trajectories.audit is not None and rollout.trajectories.audit.record.sites:
        for (site, layer), result in compare_sites(opened.params, opened.multipliers, trajectories, settings).items():
            sites.setdefault(site, {})[str(layer)] = result.figures()
    return {
        "metrics": metrics,
        "positions": _positions(trajectories, measured.logp, rollout.max_length),
        "sites": sites,
        "gap": gap_size(metrics["token_mult_prob_error"]),
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


def measure_mismatch(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    methods: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    engine: str | None = None,
    cache: Path | None = None,
    task: str | None = None,
    split: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    announce: Announce = unannounced,
) -> dict[str, Any]:
    """The whole report: per precision the pass rate and, below BF16, `verdict` and `answer`; per method the divergence.

    Args:
      path: run directory or checkpoint.
      overrides: `key=value` settings on top of the stored config.
      methods: trainer methods; None takes all that make sense at a precision.
      precisions: rollout precisions; None takes all that the engine can execute. A guidance cache has one, that it was written at.
      engine: `jax`, the embedded engine, or one of an installed package; None takes the config's.
      cache: a folder written by `trace-jax rollout --save-cache`, to compare with instead of generating.
      max_prompts: prompts of the split; None takes 64.

    Raises:
      UserError: an unknown precision, method or engine, methods that no precision knows, or a cache that does not fit.
    """
    if cache is not None and (precisions or task or split or max_prompts or engine):
        raise UserError("--cache brings its own answers; leave out --engine, --precisions, --task, --split and --max-prompts")
    origin = None if cache is None else read_origin(cache)
    plan = methods_by_precision(methods, precisions if origin is None else [origin.precision])
    announce(f"reading {path}")
    chosen = () if engine is None else (f"rollout.engine={engine}", *(() if engine == "jax" else (ONE_SUM,)))
    opened = open_policy(path, (*overrides, *chosen), task)
    try:
        config = opened.config
        if methods is not None:
            require_measurable(config, plan)
        plan = {precision: [name for name in found if name in methods_of(config, precision)] for precision, found in plan.items()}
        # Every config before the first answer: one that cannot be measured must not cost the rollouts of the others.
        configs = {
            (precision, method): precision_config(config, precision, method) for precision, found in plan.items() for method in found
        }
        report: dict[str, Any] = {
            "policy": str(path),
            "task": config.task.name if origin is None else origin.task,
            "split": None if origin is not None else split or config.eval.split,
            "cache": None if cache is None else str(cache),
            "engine": config.rollout.engine,
            "seed": seed,
            "limits": {"token_mult_prob_error": {"small": SMALL, "risky": RISKY}},
            "precisions": {},
            "not_executed": {},
        }
        done, total = 0, sum(1 + len(found) for found in plan.values())
        for precision, found in plan.items():
            announce(f"{precision}: {'generating' if origin is None else 'reading'} answers", done, total)
            try:
                rollout = (
                    cached_rollout(opened, cache)
                    if cache is not None
                    else roll_out(
                        opened,
                        precision,
                        split=report["split"],
                        prompts=max_prompts or DEFAULT_PROMPTS,
                        samples=config.eval.samples,
                        seed=seed,
                    )
                )
            except NotExecuted as error:
                if precisions:
                    raise
                report["not_executed"][precision] = str(error)
                done += 1 + len(found)
                continue
            by_method = {}
            for number, method in enumerate(found, done + 1):
                announce(f"{precision}: compiling and measuring trainer {method}", number, total)
                by_method[method] = method_report(opened, rollout, configs[precision, method])
            done += 1 + len(found)
            rate, low, high = rollout.pass_at_1
            report["precisions"][precision] = {
                "sequences": rollout.trajectories.num_sequences,
                "prompts": rollout.prompts,
                "pass_at_1": rate,
                "pass_at_1_low": low,
                "pass_at_1_high": high,
                "reward_mean": rollout.reward_mean,
                "residual_fraction": rollout.residual_fraction,
                "methods": by_method,
            }
        measured = report["precisions"]
        for precision in (name for name in measured if name != "bf16"):
            known, overrides = methods_of(config, precision), precision_overrides(config, precision)
            measured[precision] |= judge(precision, measured[precision], measured.get("bf16"), overrides, known)
        return report
    finally:
        opened.task.close()


def methods_by_precision(methods: Sequence[str] | None, precisions: Sequence[str] | None) -> Mapping[str, list[str]]:
    """What to measure: the methods of each precision. BF16 has only its own, which is the reference beside any other.

    Raises:
      UserError: an unknown name, or a precision that was asked for and knows none of the methods.
    """
    measurable = dict.fromkeys(name for names in METHODS_OF.values() for name in names)
    unknown = [name for name in methods or () if name not in measurable]
    if unknown:
        reason = "has a rollout or objective of its own and is not measured" if unknown[0] in METHODS else "is unknown"
        raise UserError(f"--methods {unknown[0]!r} {reason}; write some of: {', '.join(measurable)}")
    plan = {}
    for precision in precisions or METHODS_OF:
        require_precision(precision)
        if precision not in METHODS_OF:
            remedy = f"write some of: {', '.join(METHODS_OF)}, or measure it with --variants (rollout.weights: {precision})"
            raise UserError(f"precision {precision} is one of eval, and mismatch compares no methods at it; {remedy}")
        known = METHODS_OF[precision]
        found = [name for name in known if methods is None or name in methods or precision == "bf16"]
        if found:
            plan[precision] = found
        elif precisions:
            raise UserError(f"--methods: none of them makes sense at precision {precision}; write some of: {', '.join(known)}")
    return plan


def _positions(trajectories: Trajectories, logp: Float[np.ndarray, " N"], max_length: int) -> list[float]:
    everything = range(trajectories.num_sequences)
    padded = pad_batch(trajectories, everything, max_length)
    train = pad_batch(trajectories.replace(logprobs=logp), everything, max_length)
    longest = int(trajectories.sampled_lengths().max())
    stats = _position_gap(train.logprobs, padded.logprobs, padded.sampled, num_positions=max_length)
    metric = jax.device_get(stats["position/train_rollout_logprob_abs_diff"])
    return [float(value) for value in metric.mean()[:longest]]


_position_gap = jax.jit(position_gap_stats, static_argnames=("num_positions",))
