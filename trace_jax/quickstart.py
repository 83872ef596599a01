"""`make quickstart`: cold start, RL with guided FP4 rollouts, and what came out, on CPU in a few minutes.

1. `sft` on worked answers until the policy solves about a third of the task.
2. `train` with `configs/quickstart.yaml` (or another config given as the first argument).
3. A table and a plot: held-out reward at FP4 rollout before and after, the gap between trainer and rollout with and
   without guidance, audited code agreement, and the size of the record.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from trace_jax.cli.app import run
from trace_jax.cli.common import quiet_dependencies, to_json
from trace_jax.config import check_for_training, load
from trace_jax.files import write_atomic
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.report.quickstart import quickstart_figure
from trace_jax.terminal import result_console
from trace_jax.train.run import run_training
from trace_jax.train.run_sft import run_sft

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
LAST = 50
"""Steps at the end of the run over which gaps are summarised."""


def main(arguments: Sequence[str]) -> int:
    """Runs the quickstart.

    Args:
      arguments: optional config path, then `key=value` overrides such as `seed=1`.
    """
    quiet_dependencies()
    paths = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    config_path = Path(paths[0]) if paths else DEFAULT_CONFIG
    config = load(config_path, overrides)
    check_for_training(config)
    root = _fresh_directory(Path("runs"), config_path.stem)
    started = time.perf_counter()
    cold = root / "cold-start"
    print(f"1. cold start on worked answers -> {cold}", flush=True)
    run_sft(config, cold, _every(20, ("sft/loss", "sft/pass_at_1")))
    trained = root / "train"
    config = load(config_path, [*overrides, f"model.source={cold}"])
    print(f"2. RL, method {config.method}, {config.steps} steps -> {trained}", flush=True)
    run_training(config, trained, report=_every(20, ("reward/mean", "reward/pass_rate", "rollout_corr/k3_kl", "time/step")))
    summary = summarise(read_metrics(trained), config.eval.split) | {"seed": config.seed, "seconds": time.perf_counter() - started}
    picture = quickstart_figure(
        trained,
        {
            "title": f"{config.task.name}, method {config.method}, seed {config.seed}",
            "subtitle": "rollout with FP4 weights, activations and KV cache; trained with guided rounding",
            "before": summary["before"],
            "after": summary["after"],
            "reward_label": "pass@1, held out, FP4 rollout",
        },
        root / "quickstart.png",
    )
    write_atomic(root / "summary.json", [json.dumps(to_json(summary), indent=2).encode()])
    result_console().print(table(summary, config.eval.split))
    print(f"plot: {picture}\nrun:  {trained}   (next: trace-jax report {trained}; trace-jax mismatch {trained})")
    return 0


def summarise(rows: Sequence[dict[str, Any]], split: str) -> dict[str, Any]:
    """The figures of the table from the rows of `metrics.jsonl`."""
    evaluated = [row for row in rows if f"eval/{split}/pass_at_1" in row]
    unguided = [row for row in rows if "unguided/rollout_corr/k3_kl" in row][-LAST // 10 :]
    last = [row for row in rows if "rollout_corr/k3_kl" in row][-LAST:]

    def rate(row: dict[str, Any]) -> dict[str, float]:
        name = f"eval/{split}/pass_at_1"
        return {"step": row["step"], "value": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}

    def median(found: Sequence[dict[str, Any]], name: str) -> float:
        values = [row[name] for row in found if row.get(name) is not None]
        return statistics.median(values) if values else float("nan")

    agreement: dict[int, list[float]] = {}
    for row in rows[-LAST:]:
        for name, value in row.items():
            if name.startswith("guidance/audit/code_agreement/") and value is not None:
                agreement.setdefault(int(name.rsplit("_", 1)[1]), []).append(value)
    prefix = "guidance/bytes_per_token"
    newest = next((row for row in reversed(rows) if prefix in row), {})
    return {
        "before": rate(evaluated[0]),
        "after": rate(evaluated[-1]),
        "reward_before": evaluated[0][f"eval/{split}/reward_mean"],
        "reward_after": evaluated[-1][f"eval/{split}/reward_mean"],
        "k3_guided": median(unguided, "rollout_corr/k3_kl"),
        "k3_unguided": median(unguided, "unguided/rollout_corr/k3_kl"),
        "gap_guided": median(unguided, "train_rollout_logprob_abs_diff"),
        "gap_unguided": median(unguided, "unguided/train_rollout_logprob_abs_diff"),
        "code_agreement": {layer: statistics.mean(values) for layer, values in sorted(agreement.items())},
        "bytes_per_token": {name.removeprefix(prefix + "/"): value for name, value in newest.items() if name.startswith(prefix + "/")},
        "bytes_per_token_total": newest.get(prefix),
        "seconds_per_step": {part: median(last, f"time/{part}") for part in ("rollout", "train", "sync", "step")},
    }


def table(summary: dict[str, Any], split: str) -> Table:
    """The summary as a table."""
    shown = Table(title="What the quickstart shows", title_justify="left")
    shown.add_column("figure")
    shown.add_column("value")
    for when in ("before", "after"):
        rate = summary[when]
        shown.add_row(
            f"pass@1 at FP4 rollout, {split} split, step {rate['step']}",
            f"{rate['value']:.3f}  (95 %: {rate['low']:.3f} to {rate['high']:.3f}); mean reward {summary[f'reward_{when}']:.3f}",
        )
    shown.add_row("train-rollout KL (k3), guided forward", f"{summary['k3_guided']:.2e}  (mean gap {summary['gap_guided']:.4f})")
    shown.add_row("train-rollout KL (k3), same forward unguided", f"{summary['k3_unguided']:.2e}  (mean gap {summary['gap_unguided']:.4f})")
    by_layer = "  ".join(f"layer {layer}: {value:.3f}" for layer, value in summary["code_agreement"].items())
    shown.add_row("audited: values equal in trainer and rollout", by_layer)
    parts = "  ".join(f"{name} {value:g}" for name, value in summary["bytes_per_token"].items() if name != "constants")
    shown.add_row("record, bytes per token", f"{summary['bytes_per_token_total']:.1f}  ({parts})")
    times = summary["seconds_per_step"]
    shown.add_row("seconds per step", "  ".join(f"{name} {value:.3f}" for name, value in times.items()))
    shown.add_row("seed, total seconds", f"{summary['seed']}, {summary['seconds']:.0f}")
    return shown


def _every(count: int, names: Sequence[str]) -> Callable[[int, dict[str, Any]], None]:
    def report(step: int, metrics: dict[str, Any]) -> None:
        if step == 1 or step % count == 0:
            found = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            if found:
                print(f"   step {step:>4}  " + "  ".join(found), flush=True)

    return report


def _fresh_directory(parent: Path, name: str) -> Path:
    candidates = (parent / (name if number == 1 else f"{name}-{number}") for number in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:])))
