"""What a run shows, as figures: the tables and pictures of `quickstart` and `compare` all read this, so they cannot disagree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trace_jax.config import Config
from trace_jax.report.plots import interval, mismatch_lines
from trace_jax.report.series import Run

LAST = 50
"""Steps at the end of the run over which gaps and times are summarised."""

TIMES = ("rollout", "train", "sync", "step")


@dataclass(frozen=True)
class Rate:
    """A held-out evaluation: the step it was made after, pass@1 with its 95 % interval, and the mean reward."""

    step: int
    pass_at_1: float
    low: float
    high: float
    reward_mean: float


@dataclass(frozen=True)
class Gap:
    """Medians of one forward over the window: KL of trainer and rollout (k3), mean and largest |log-prob difference| of a step."""

    forward: str
    metric: str
    k3_kl: float
    logprob_abs_diff: float
    logprob_abs_diff_max: float


@dataclass(frozen=True)
class Summary:
    """The figures of a run; what it did not record is empty.

    Args:
      method, seed, task, split: as configured.
      rollout: the precision that the engine executed, such as `nvfp4`, and how it sums.
      trainer: how the forward that trains rounds.
      evaluations: the first, and the last if there is another.
      window: the steps that `gaps` are medians of; guided and unguided are of the same steps.
      gaps: of the forward that trains, and of the same forward unguided.
      code_agreement: share of values equal in trainer and rollout by site and layer, newest audit.
      bytes_per_token: size of the record by part.
      seconds_per_step: medians over the last `LAST` steps.
    """

    method: str
    seed: int
    task: str
    split: str
    rollout: str
    trainer: str
    evaluations: tuple[Rate, ...]
    window: str
    gaps: tuple[Gap, ...]
    code_agreement: dict[str, dict[int, float]]
    bytes_per_token: dict[str, float]
    seconds_per_step: dict[str, float]

    def agreement_by_layer(self) -> dict[int, float]:
        """The audited agreement of each layer, mean over its sites."""
        layers = sorted({layer for site in self.code_agreement.values() for layer in site})
        found = {layer: [site[layer] for site in self.code_agreement.values() if layer in site] for layer in layers}
        return {layer: sum(values) / len(values) for layer, values in found.items()}


def summarise(run: Run, config: Config) -> Summary:
    """The figures of a run that was trained with `config`."""
    last = Run(run.name, [row for row in run.rows if row["step"] > max(0, run.rows[-1]["step"] - LAST)])
    window, rows = _gap_window(last)
    times = {part: last.series(f"time/{part}") for part in TIMES}
    return Summary(
        method=config.method,
        seed=config.seed,
        task=config.task.name,
        split=config.eval.split,
        rollout=_rollout(run, config),
        trainer=_trainer(config),
        evaluations=_evaluations(run, config.eval.split),
        window=window,
        gaps=_gaps(run, rows),
        code_agreement=run.audit("code_agreement"),
        bytes_per_token=run.bytes_per_token(),
        seconds_per_step={part: series.median() for part, series in times.items() if series},
    )


def _rollout(run: Run, config: Config) -> str:
    precision = run.text(f"eval/{config.eval.split}/precision") or "unknown precision"
    parts = config.rollout.partial_sums
    return precision + (f", sums in {parts} shares like {parts} devices" if parts > 1 else "")


def _trainer(config: Config) -> str:
    rounding = set(config.train_quant.model_dump().values())
    if "guided" in rounding:
        return "guided rounding"
    return "rounding of its own" if "rtn" in rounding else "no rounding"


def _evaluations(run: Run, split: str) -> tuple[Rate, ...]:
    points, reward = run.series(f"eval/{split}/pass_at_1"), run.series(f"eval/{split}/reward_mean")
    low, high = interval(run, split, "pass_at_1", points)
    rates = [
        Rate(int(points.steps[i]), *(float(column[i]) for column in (points.values, low, high, reward.values))) for i in range(len(low))
    ]
    return (rates[0], rates[-1]) if len(rates) > 1 else tuple(rates)


def _gap_window(last: Run) -> tuple[str, list[dict[str, Any]]]:
    unguided = [row for row in last.rows if "unguided/rollout_corr/k3_kl" in row]
    rows = unguided or last.rows
    of = f"{len(rows)} of " if len(rows) < len(last.rows) else ""
    return f"median of {of}the last {len(last.rows)} steps", rows


def _gaps(run: Run, rows: Sequence[dict[str, Any]]) -> tuple[Gap, ...]:
    chosen = Run(run.name, list(rows))
    gaps = []
    for line in mismatch_lines(run):
        kl = chosen.series(line.key)
        if kl:
            difference = line.key.replace("rollout_corr/k3_kl", "train_rollout_logprob_abs_diff")
            mean, largest = (chosen.series(name).median() for name in (difference, f"{difference}_max"))
            gaps.append(Gap(line.label, line.key, kl.median(), mean, largest))
    return tuple(gaps)
