"""`trace-jax eval`: the pass rate of a policy at a rollout precision."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from trace_jax.errors import UserError
from trace_jax.evaluation.open_policy import OpenPolicy, open_policy
from trace_jax.evaluation.pass_rate import PassRate, measure_pass_rate
from trace_jax.evaluation.precisions import precision_config
from trace_jax.terminal import Announce, result_console, unannounced
from trace_jax.train.setup import sync_weights


def evaluate_policy(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    task: str | None = None,
    precision: str | None = None,
    samples: int | None = None,
    split: str | None = None,
    max_prompts: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    announce: Announce = unannounced,
) -> dict[str, Any]:
    """Measures a policy on a split of its task; None takes the stored setting.

    Returns:
      The fields of `PassRate`, and `policy`, `task`, `split`, `greedy`, `temperature` (0 if greedy), `seed`.

    Raises:
      UserError: a setting is wrong, or greedy answers are asked for more than once per prompt.
    """
    announce(f"reading {path}")
    opened = open_policy(path, overrides, task)
    try:
        config = opened.config
        split, samples = split or config.eval.split, samples or config.eval.samples
        temperature = 0.0 if greedy or config.eval.greedy else config.rollout.temperature
        if temperature == 0 and samples > 1:
            raise UserError(f"{samples} greedy answers to one prompt are all the same; write --samples 1, or sample instead")
        announce(f"generating and verifying answers, {split} split, {precision or 'own precision'}")
        result = pass_rate_at(
            opened,
            precision,
            split=split,
            samples=samples,
            max_prompts=max_prompts or config.eval.max_prompts,
            temperature=temperature,
            seed=seed,
        )
    finally:
        opened.task.close()
    return asdict(result) | {
        "policy": str(path),
        "task": config.task.name,
        "split": split,
        "greedy": temperature == 0,
        "temperature": temperature,
        "seed": seed,
    }


def pass_rate_at(
    opened: OpenPolicy, precision: str | None, *, split: str, samples: int, max_prompts: int | None, temperature: float, seed: int
) -> PassRate:
    """The pass rate of an opened policy at a precision (None: the config's own), in a fresh engine."""
    config = opened.config if precision is None else precision_config(opened.config, precision, "naive")
    setup = opened.setup(config)
    sampling = replace(setup.sampling, temperature=temperature)
    with closing(setup.engine()) as engine:
        sync_weights(engine, setup, opened.params, opened.multipliers, 0)
        return measure_pass_rate(
            engine, setup.task, setup.tokenizer, sampling, split=split, samples=samples, max_prompts=max_prompts, seed=seed
        )


def print_pass_rate(result: dict[str, Any]) -> None:
    """One table on stdout."""
    table = Table(
        title=Text(f"{result['policy']} on {result['task']} ({result['split']} split)", "bold"),
        title_justify="left",
        box=None,
        show_header=False,
    )
    table.add_column(style="dim")
    table.add_column()
    name = "pass@1" if result["samples"] == 1 else f"avg@{result['samples']}"
    rows = {
        "rollout precision": str(result["precision"]),
        "sampling": "greedy" if result["greedy"] else f"temperature {result['temperature']:g}",
        f"{name} [95 %]": f"{result['pass_at_1']:.3f} [{result['low']:.3f}, {result['high']:.3f}]",
        "mean reward": f"{result['reward_mean']:.3f}",
        "prompts x answers": f"{result['prompts']} x {result['samples']}",
        "mean answer length": f"{result['response_length_mean']:.1f} tokens",
        "answers cut at the limit": f"{result['truncated_fraction']:.1%}",
        "verifier errors": str(result["verifier_errors"]),
    }
    for label, value in rows.items():
        table.add_row(Text(label), Text(value))
    result_console().print(table)
