"""`trace-jax mismatch`: what a precision costs in pass rate, and how far trainer and rollout drift apart at it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_jax.cli.arguments import Json, MaxPrompts, Overrides, Policy, Seed, Split, Task
from trace_jax.cli.common import run_and_show, split_names
from trace_jax.errors import UserError


def mismatch(
    policy: Policy,
    overrides: Overrides = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Comma-separated methods of the trainer, such as naive,qat,trace; all by default.")
    ] = None,
    precisions: Annotated[
        str | None,
        typer.Option(
            "--precisions", help="Comma-separated rollout precisions, such as nvfp4,mxfp4; all that the engine executes by default."
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Rollout engine, such as jax or vllm; the config's by default.")] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder of a saved guidance cache to compare with, instead of generating.")
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option("--variants", help="YAML file of variants, NAME: {config keys}, to measure instead of methods and precisions."),
    ] = None,
    task: Task = None,
    split: Split = None,
    max_prompts: MaxPrompts = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Is this model safe in FP4? Its pass rate against bf16, and the gap of trainer and rollout: as a whole, by token, by layer."""
    if variants is not None:
        from trace_jax.evaluation.mismatch_variants import measure_variants, print_variants

        if methods or precisions or engine or cache:
            raise UserError("--variants says itself how to round; leave out --methods, --precisions, --engine and --cache")
        run_and_show(
            lambda display: measure_variants(
                policy,
                variants,
                overrides or [],
                task=task,
                split=split,
                max_prompts=max_prompts,
                seed=seed,
                announce=display.announce,
            ),
            print_variants,
            json=json,
        )
        return

    from trace_jax.evaluation.mismatch import measure_mismatch
    from trace_jax.evaluation.mismatch_tables import print_mismatch

    run_and_show(
        lambda display: measure_mismatch(
            policy,
            overrides or [],
            methods=split_names(methods),
            precisions=split_names(precisions),
            engine=engine,
            cache=cache,
            task=task,
            split=split,
            max_prompts=max_prompts,
            seed=seed,
            announce=display.announce,
        ),
        print_mismatch,
        json=json,
    )
