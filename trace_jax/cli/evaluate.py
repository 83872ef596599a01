"""`trace-jax eval`: the held-out pass rate of a policy at any rollout precision."""

from __future__ import annotations

from typing import Annotated

import typer

from trace_jax.cli.arguments import Json, MaxPrompts, Overrides, Policy, Seed, Split, Task
from trace_jax.cli.common import run_and_show


def evaluate(
    policy: Policy,
    overrides: Overrides = None,
    task: Task = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="bf16, fp8, nvfp4, mxfp4 or nvfp4_4over6 for weights, inputs and KV; the run's own by default."),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per prompt; eval.samples by default.")] = None,
    split: Split = None,
    max_prompts: MaxPrompts = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most probable token instead of sampling.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure pass@1 or avg@k with a confidence interval."""
    from trace_jax.evaluation.run import evaluate_policy, print_pass_rate

    run_and_show(
        lambda display: evaluate_policy(
            policy,
            overrides or [],
            task=task,
            precision=precision,
            samples=samples,
            split=split,
            max_prompts=max_prompts,
            greedy=greedy,
            seed=seed,
            announce=display.announce,
        ),
        print_pass_rate,
        json=json,
    )
