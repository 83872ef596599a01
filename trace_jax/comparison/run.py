"""All runs of a comparison in one process, in a folder that a later call continues.

1. Everything is checked, down to each method's layers and devices, before anything is written.
2. The start is found or made, once.
3. Seed by seed, each method trains; runs of a seed share the task, and the evaluation before training where the rollout is the same.
4. Each policy is evaluated once more with a BF16 rollout.
5. The figures are computed anew from the files of the runs.

What is complete is never repeated; a run that was cut short goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trace_jax.comparison.figures import BF16_EVALUATION, DIVERGED, comparison_figures, rolls_out_in_bf16
from trace_jax.comparison.page import write_page
from trace_jax.comparison.plan import Comparison, PlannedRun
from trace_jax.comparison.start import existing_start, make_start, start_policy
from trace_jax.comparison.state import STATE, stored_start, write_state
from trace_jax.config import Config, load
from trace_jax.evaluation.open_policy import OpenPolicy
from trace_jax.evaluation.precisions import precision_config
from trace_jax.evaluation.run import pass_rate_at
from trace_jax.files import write_atomic
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.models.registry import ModelConfig
from trace_jax.tasks import Task
from trace_jax.terminal import Announce, say, unannounced
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.read_checkpoint import complete_steps
from trace_jax.train.run import Shared, run_training
from trace_jax.train.run_folder import Report, claimed
from trace_jax.train.setup import build_setup, load_config_task
from trace_jax.train.skipped import Diverged
from trace_jax.train.stop import StopRequest, stop_on_signal

Watch: TypeAlias = Callable[[str, int, int], None]
"""Told after every step what runs, and how many of how many steps of all runs are done."""

RUNS = "runs"
JSON = "comparison.json"


def run_comparison(
    comparison: Comparison,
    out: Path,
    *,
    resume: bool = False,
    announce: Announce = unannounced,
    progress: Watch = lambda what, done, total: None,
) -> dict[str, Any] | None:
    """Trains, evaluates and writes `comparison.json`, its PNGs and the page.

    Args:
      comparison: from `plan_comparison`.
      out: a new or empty folder, or one to resume.
      resume: go on with the comparison there.

    Returns:
      What `comparison.json` holds; None if a signal stopped it, after which it can be resumed.

    Raises:
      UserError: a config cannot work, a folder cannot be used, or what is to be resumed is another comparison.
    """
    with stop_on_signal() as stop, claimed(out, resume=resume, marker=STATE):
        work = _Work(comparison, out, stop, announce, progress)
        figures = comparison_figures(comparison, out / RUNS) if work.begin(resume) and work.all_runs() else None
        if figures is None:
            finished = f"{sum(map(work.finished, comparison.runs()))} of {len(comparison.runs())} runs are finished; go on with --resume"
            say(f"comparison stopped, {finished if (out / STATE).exists() else 'nothing was written'}")
            return None
        announce("drawing")
        write_atomic(out / JSON, [json.dumps(figures, indent=2, allow_nan=False).encode()])
        write_page(figures, out)
        return figures


def require_setups(comparison: Comparison, policy: tuple[str, ModelConfig] | None, task: Task) -> None:
    """Refuses what the start of a run, or its evaluation with a BF16 rollout, would refuse.

    Args:
      policy: family and shape of the start; None for that of the config.
      task: of the first seed.
    """
    for config in comparison.variants.values():
        setup = build_setup(config, policy, task)
        setup.require_rows()
        setup.max_sequence_tokens()
        setup.capture()
        if not rolls_out_in_bf16(config):
            build_setup(precision_config(config, "bf16", "naive"), policy, task)


@dataclass
class _Work:
    comparison: Comparison
    out: Path
    stop: StopRequest
    announce: Announce
    progress: Watch
    start: Path | None = None

    def begin(self, resume: bool) -> bool:
        """Checks everything, writes the state and makes the start; False if a signal stopped that."""
        base = self.comparison.base
        self.announce("reading and checking")
        known = stored_start(self.out, self.comparison) if resume else existing_start(base)
        with closing(load_config_task(base)) as task:
            require_setups(self.comparison, start_policy(base, known, task), task)
        if self.stop.asked:
            return False
        write_state(self.out, self.comparison, known)
        if known is None:
            self.announce(
                f"cold start, at most {base.sft.steps} steps" if base.model.source is None else f"calibrating {base.model.source}"
            )
        self.start = known or make_start(base, self.out, lambda step, _: self.progress("cold start", step, base.sft.steps))
        return self.start is not None

    def all_runs(self) -> bool:
        """Trains and evaluates; False if a signal stopped that."""
        planned = self.comparison.runs()
        for seed in self.comparison.seeds:
            of_seed = [run for run in planned if run.seed == seed]
            if all(self.finished(run) for run in of_seed):
                continue
            with closing(load_config_task(of_seed[0].config)) as task:
                first: dict[str, Mapping[str, Any]] = {}
                for run in of_seed:
                    if self.stop.asked or not self.one_run(run, planned.index(run), task, first):
                        return False
        return True

    def one_run(self, run: PlannedRun, index: int, task: Task, first: dict[str, Mapping[str, Any]]) -> bool:
        """Trains and evaluates one run, as far as that is not done; `first` maps a rollout to the evaluation of the start at it."""
        folder, runs = self.out / RUNS / run.name, len(self.comparison.runs())
        rollout = run.config.rollout.model_dump_json()
        steps, total = run.config.steps, runs * run.config.steps
        if not self.trained(run):
            self.announce(f"{run.variant}, seed {run.seed}: run {index + 1} of {runs}")

            def report(step: int, metrics: dict[str, Any]) -> None:
                self.progress(
                    f"{run.variant}, seed {run.seed}, reward {metrics.get('reward/mean', float('nan')):.3f}", index * steps + step, total
                )

            if not self.train(run.config, folder, Shared(task, first.get(rollout)), report):
                return False
        rows = read_metrics(folder)
        first.setdefault(rollout, {name: value for name, value in rows[0].items() if name.startswith("eval/")})
        if not self.finished(run):
            if self.stop.asked:
                return False
            self.announce(f"{run.variant}, seed {run.seed}: evaluating with a bf16 rollout")
            self.evaluate_bf16(run.config, folder, task)
        return True

    def trained(self, run: PlannedRun) -> bool:
        folder = self.out / RUNS / run.name
        return run.config.steps in complete_steps(folder / "checkpoints") or (folder / DIVERGED).exists()

    def finished(self, run: PlannedRun) -> bool:
        evaluated = rolls_out_in_bf16(run.config) or (self.out / RUNS / run.name / BF16_EVALUATION).exists()
        return evaluated and self.trained(run)

    def train(self, config: Config, folder: Path, shared: Shared, report: Report) -> bool:
        """Starts or continues one run; False if a signal stopped it."""
        resume = (folder / "config.yaml").exists()
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # what a kill left of a start
        # A run that goes on has its start in its checkpoints; the folder may have moved since, or be named in another way.
        source = load(folder / "config.yaml").model.source if resume else str(self.start)
        config = config.model_copy(update={"model": config.model.model_copy(update={"source": source})})
        try:
            return not run_training(config, folder, resume=resume, report=report, shared=shared).stopped
        except Diverged as error:
            write_atomic(folder / DIVERGED, [json.dumps({"step": error.step}).encode()])
            say(f"{folder.name}: {error}")
            return True

    def evaluate_bf16(self, config: Config, folder: Path, task: Task) -> None:
        """The pass rate of a trained policy with nothing rounded in the rollout, beside its run."""
        loaded = load_policy(folder)
        opened = OpenPolicy(config, loaded.policy, loaded.params, loaded.multipliers, task)
        temperature = 0.0 if config.eval.greedy else config.rollout.temperature
        rate = pass_rate_at(
            opened,
            "bf16",
            split=config.eval.split,
            samples=config.eval.samples,
            max_prompts=config.eval.max_prompts,
            temperature=temperature,
            seed=config.seed,
        )
        write_atomic(folder / BF16_EVALUATION, [json.dumps(asdict(rate), indent=2).encode()])
