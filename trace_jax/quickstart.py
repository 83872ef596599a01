"""`make quickstart`: cold start, RL with the configured method, and what came out, on CPU in a few minutes.

1. `sft` on worked answers until the policy solves about a third of the task.
2. `train` with `configs/quickstart.yaml` (or another config given as the first argument).
3. A table and a plot: held-out pass rate before and after, the gap between trainer and rollout with and without guidance,
   audited code agreement, and the size of the record; what the method does not have is left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from trace_jax.cli.app import run
from trace_jax.cli.common import FAILURE, quiet_dependencies, to_json
from trace_jax.config import check_for_training, load
from trace_jax.files import write_atomic
from trace_jax.report.quickstart import quickstart_figure
from trace_jax.report.run_summary import Summary, summarise
from trace_jax.report.series import load_runs
from trace_jax.terminal import result_console
from trace_jax.train.run import run_training
from trace_jax.train.run_sft import run_sft

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"


def main(arguments: Sequence[str]) -> int:
    """Runs the quickstart.

    Args:
      arguments: optional config path, then `key=value` overrides such as `seed=1`.

    Returns:
      The exit code: 0, or 1 when a signal stopped one of the two runs.
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
    if run_sft(config, cold, _every(20, ("sft/loss", "sft/pass_at_1"))).stopped:
        return FAILURE
    trained = root / "train"
    config = load(config_path, [*overrides, f"model.source={cold}"])
    print(f"2. RL, method {config.method}, {config.steps} steps -> {trained}", flush=True)
    shown = ("reward/mean", "reward/pass_rate", "rollout_corr/k3_kl", "time/step")
    if run_training(config, trained, report=_every(20, shown)).stopped:
        return FAILURE
    (finished,) = load_runs([trained])
    summary = summarise(finished, config)
    seconds = time.perf_counter() - started
    picture = quickstart_figure(finished, summary, root / "quickstart.png")
    write_atomic(root / "summary.json", [json.dumps(to_json(asdict(summary) | {"seconds": seconds}), indent=2).encode()])
    result_console().print(table(summary, seconds))
    print(f"plot: {picture}\nrun:  {trained}   (next: trace-jax report {trained}; trace-jax mismatch {trained})")
    return 0


def table(summary: Summary, seconds: float) -> Table:
    """The summary as a table; a figure that the run does not have is left out."""
    shown = Table(title="What the quickstart shows", title_justify="left")
    shown.add_column("figure")
    shown.add_column("value")
    for rate in summary.evaluations:
        shown.add_row(
            f"pass@1, {summary.split} split, step {rate.step}",
            f"{rate.pass_at_1:.3f}  (95 %: {rate.low:.3f} to {rate.high:.3f}); mean reward {rate.reward_mean:.3f}",
        )
    for gap in summary.gaps:
        shown.add_row(f"train-rollout KL (k3), {gap.forward}", f"{gap.k3_kl:.2e}  (mean gap {gap.logprob_abs_diff:.4f}), {summary.window}")
    if summary.code_agreement:
        by_layer = "  ".join(f"layer {layer}: {value:.3f}" for layer, value in summary.agreement_by_layer().items())
        shown.add_row("equal values, newest audit, mean over sites", by_layer)
    if summary.bytes_per_token:
        parts = "  ".join(f"{name} {value:g}" for name, value in summary.bytes_per_token.items() if name != "constants")
        shown.add_row("record, bytes per token", f"{sum(summary.bytes_per_token.values()):.1f}  ({parts})")
    if summary.seconds_per_step:
        times = "  ".join(f"{name} {value:.3f}" for name, value in summary.seconds_per_step.items())
        shown.add_row("seconds per step", times)
    shown.add_row("rollout; trainer", f"{summary.rollout}; {summary.trainer}")
    shown.add_row("seed, total seconds", f"{summary.seed}, {seconds:.0f}")
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
