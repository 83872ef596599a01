"""The gap of one policy under named variants of the config: layers or bits of the record, formats of the cache, channels compensated.

Variants whose rollout is the same share its answers, so that what is compared differs in nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from trace_jax.comparison.variants import read_variants
from trace_jax.config import Config, from_mapping
from trace_jax.config.keys import overlay
from trace_jax.config.presets import preset
from trace_jax.evaluation.mismatch import DEFAULT_PROMPTS, method_report
from trace_jax.evaluation.open_policy import open_policy
from trace_jax.evaluation.precision_rollout import PrecisionRollout, roll_out_config
from trace_jax.quantization.plan import RECORDED_SITES
from trace_jax.terminal import Announce, result_console, unannounced


def measure_variants(
    path: Path,
    file: Path,
    overrides: Sequence[str] = (),
    *,
    task: str | None = None,
    split: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    announce: Announce = unannounced,
) -> dict[str, Any]:
    """Measures every variant of a file.

    Args:
      path: run directory or checkpoint.
      file: YAML, name -> config keys on top of those of the run, as for `trace-jax compare --variants`.
      overrides: `key=value` settings on top of the stored config.
      max_prompts: prompts of the split; None takes 64.

    Returns:
      `variants`: name -> pass rate of its rollout, and `metrics`, `positions`, `sites`, `gap` of `method_report`.

    Raises:
      UserError: the file, a variant or the policy cannot be used.
    """
    named = read_variants(file)
    announce(f"reading {path}")
    opened = open_policy(path, overrides, task)
    try:
        configs = {name: variant_config(opened.config, settings) for name, settings in named.items()}
        split = split or opened.config.eval.split
        rollouts: dict[str, PrecisionRollout] = {}
        measured = {}
        for number, (name, config) in enumerate(configs.items()):
            key = config.rollout.model_dump_json()
            if key not in rollouts:
                announce(f"{name}: generating answers", number, len(configs))
                prompts = max_prompts or DEFAULT_PROMPTS
                rollouts[key] = roll_out_config(opened, config, split=split, prompts=prompts, samples=config.eval.samples, seed=seed)
            rollout = rollouts[key]
            announce(f"{name}: compiling and measuring", number, len(configs))
            rate, low, high = rollout.pass_at_1
            measured[name] = {"rollout": rollout.precision, "prompts": rollout.prompts, "pass_at_1": rate} | {
                **{"pass_at_1_low": low, "pass_at_1_high": high, "reward_mean": rollout.reward_mean},
                **method_report(opened, rollout, config),
            }
        return {"policy": str(path), "task": opened.config.task.name, "split": split, "seed": seed, "variants": measured}
    finally:
        opened.task.close()


def variant_config(base: Config, settings: Sequence[str]) -> Config:
    """The config of a run with a variant's settings on top; a `method` among them brings its preset, at every recordable site.

    Raises:
      UserError: an unknown method or key, or a value that is none.
    """
    given = dict(setting.split("=", 1) for setting in settings)
    values = base.model_dump(mode="json")
    if "method" in given:
        method = json.loads(given.pop("method"))
        keys = overlay(preset(method), {"guidance": {"sites": list(RECORDED_SITES)}})
        values = overlay(values, keys) | {"method": method}
    return from_mapping(values, [f"{key}={value}" for key, value in given.items()])


def print_variants(report: Mapping[str, Any]) -> None:
    """Prints one row a variant: pass rate of its rollout, gap, and how its values were rounded."""
    shown = Table(title=f"{report['policy']}: {report['task']}, {report['split']} split", title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("variant")
    for column in ("pass@1", "KL (k3)", "|gap|", "largest", "equal codes, worst layer", "one apart, worst layer"):
        shown.add_column(column, justify="right")
    for name, entry in report["variants"].items():
        metrics = entry["metrics"]
        layers = [figures for site in entry["sites"].values() for figures in site.values()]
        shown.add_row(
            name,
            f"{entry['pass_at_1']:.3f}",
            f"{metrics['rollout_corr/k3_kl']:.1e}",
            f"{metrics['train_rollout_logprob_abs_diff']:.1e}",
            f"{metrics['train_rollout_logprob_abs_diff_max']:.2f}",
            *(_lowest([one[figure] for one in layers]) for figure in ("code_agreement", "adjacent_share")),
        )
    result_console().print(shown)


def _lowest(shares: Sequence[float]) -> str:
    """Of those that are shares of something; a layer where nothing differs has no share of differences."""
    numbers = [share for share in shares if not math.isnan(share)]
    return f"{min(numbers):.4f}" if numbers else "-"
