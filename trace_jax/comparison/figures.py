"""`comparison.json` from the files of the runs: one entry per method, and in it one per seed with the same keys.

Everything is read from `metrics.jsonl` and the two small files that the comparison puts beside it; docs/comparison.md explains each key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trace_jax.comparison.collapse import find_collapse
from trace_jax.comparison.plan import Comparison, PlannedRun
from trace_jax.comparison.pooling import medians, pooled_rate
from trace_jax.config import Config
from trace_jax.report.run_summary import Gap, Rate, summarise
from trace_jax.report.series import Run, load_runs

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes; new keys may come without."""

BF16_EVALUATION = "bf16_evaluation.json"
"""In the folder of a run: its last policy, evaluated with nothing rounded in the rollout."""

DIVERGED = "diverged.json"
"""In the folder of a run that gave up: the step."""

GAP_FIGURES = ("k3_kl", "logprob_abs_diff", "logprob_abs_diff_max")


def comparison_figures(comparison: Comparison, runs: Path) -> dict[str, Any]:
    """What `comparison.json` holds.

    Args:
      runs: the folder with the folders of all runs, each complete.
    """
    base = comparison.base
    entries = [(run.variant, run_figures(run, runs / run.name)) for run in comparison.runs()]
    return {
        "schema_version": SCHEMA_VERSION,
        "task": base.task.name,
        "split": base.eval.split,
        "samples": base.eval.samples,
        "steps": base.steps,
        "seeds": list(comparison.seeds),
        "methods": {
            name: method_figures(config, [entry for variant, entry in entries if variant == name])
            for name, config in comparison.variants.items()
        },
    }


def rolls_out_in_bf16(config: Config) -> bool:
    """Whether a rollout rounds nothing, so that its own evaluations are those at BF16."""
    rollout = config.rollout
    return {rollout.weights, rollout.activations, rollout.kv_cache.k, rollout.kv_cache.v} == {"bf16"}


def run_figures(planned: PlannedRun, folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    (run,) = load_runs([folder])
    summary = summarise(run, planned.config)
    before, *after = [_rate(rate) for rate in summary.evaluations] or [None]
    reached = after[-1] if after else None
    bf16 = reached if rolls_out_in_bf16(planned.config) else _json(folder / BF16_EVALUATION)
    collapse = find_collapse(run, planned.config.eval.split, (_json(folder / DIVERGED) or {}).get("step"))
    return {
        "seed": planned.seed,
        "run": f"{folder.parent.name}/{folder.name}",
        "last_step": run.rows[-1]["step"],
        "rollout": summary.rollout,
        "trainer": summary.trainer,
        "before": before,
        "after": reached,
        "after_bf16": None if bf16 is None else {name: bf16[name] for name in ("pass_at_1", "low", "high", "reward_mean")},
        "window": summary.window,
        "gaps": _gaps(run, summary.gaps),
        "code_agreement": {str(layer): share for layer, share in summary.agreement_by_layer().items()},
        "code_agreement_by_site": {
            site: {str(layer): share for layer, share in layers.items()} for site, layers in summary.code_agreement.items()
        },
        "bytes_per_token": summary.bytes_per_token,
        "seconds_per_step": summary.seconds_per_step,
        "collapse": None if collapse is None else asdict(collapse),
    }


def method_figures(config: Config, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a method over its seeds: rates pooled, the others medians; what is the same in all is taken from the first."""
    rates = {name: pooled_rate([run[name] for run in runs if run[name] is not None]) for name in ("before", "after", "after_bf16")}
    sites = list(dict.fromkeys(site for run in runs for site in run["code_agreement_by_site"]))
    return {
        "method": config.method,
        "rollout": runs[0]["rollout"],
        "trainer": runs[0]["trainer"],
        **rates,
        "window": runs[0]["window"],
        "gaps": {
            forward: medians(found) | {"seeds": len(found)} if (found := [gap for run in runs if (gap := run["gaps"][forward])]) else None
            for forward in ("training", "guided", "unguided")
        },
        "code_agreement": medians([run["code_agreement"] for run in runs]),
        "code_agreement_by_site": {
            site: medians([run["code_agreement_by_site"][site] for run in runs if site in run["code_agreement_by_site"]]) for site in sites
        },
        "bytes_per_token": medians([run["bytes_per_token"] for run in runs]),
        "seconds_per_step": medians([run["seconds_per_step"] for run in runs]),
        "collapses": [{"seed": run["seed"], **run["collapse"]} for run in runs if run["collapse"] is not None],
        "runs": list(runs),
    }


def _gaps(run: Run, gaps: Sequence[Gap]) -> dict[str, dict[str, float] | None]:
    """By forward: the one that trains, which is the guided or the unguided one, and both of them where there are both."""
    found = {gap.metric.startswith("unguided/"): {name: getattr(gap, name) for name in GAP_FIGURES} for gap in gaps}
    training = found.get(False)
    guided = run.guided()
    return {"training": training, "guided": training if guided else None, "unguided": found.get(True) if guided else training}


def _rate(rate: Rate) -> dict[str, float]:
    return {"step": rate.step, "pass_at_1": rate.pass_at_1, "low": rate.low, "high": rate.high, "reward_mean": rate.reward_mean}


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
